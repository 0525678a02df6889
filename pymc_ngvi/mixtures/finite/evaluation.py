"""log p and moments at draws of every component of a mixture, and the nats that are left to gain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, BaseDraws, Density, Estimator, Evaluation, Moments
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.component import ComponentTarget


@stored("mixture.evaluation")
@dataclass(frozen=True)
class MixtureEvaluation:
    """Draws of each component, each from the same base draws, seen as a problem of that component alone."""

    base: BaseDraws
    #: Of the target of each component; ``parts[c].elbo`` is its reward E_{q_c}[log p - log q], from values of log q
    #: at the draws, which have no noise where q is the posterior.
    parts: tuple[Evaluation, ...]
    #: log p - log q at the draws; NaN where log p is not finite; shape (n_components, n_draws).
    ratios: Array
    #: log p there; NaN where it is not finite; shape (n_components, n_draws).
    log_p: Array
    #: shape (n_components,).
    log_weights: Array

    @property
    def rewards(self) -> Array:
        """Mean of log p - log q under each component, (n_components,)."""
        return np.array([part.elbo for part in self.parts])

    @property
    def elbo(self) -> float:
        """ELBO of the mixture."""
        return float(np.exp(self.log_weights) @ self.rewards)

    @property
    def n_dropped(self) -> int:
        """Draws at which log p or its gradient was not finite."""
        return int(sum((~part.finite).sum() for part in self.parts))

    def replicate_rewards(self) -> Array:
        """Return the rewards as each replicate gives them, (n_replicates, n_components); all share the base draws."""
        parts = [self.ratios[:, rows] for rows in self.base.replicates()]
        parts = [part for part in parts if np.isfinite(part).any(axis=1).all()]
        return np.array([np.nanmean(part, axis=1) for part in parts]).reshape(len(parts), len(self.parts))

    def elbo_se(self) -> float:
        """Return the Monte Carlo standard error of the ELBO."""
        elbos = self.replicate_rewards() @ np.exp(self.log_weights)
        return float(elbos.std(ddof=1) / np.sqrt(len(elbos))) if len(elbos) > 1 else np.inf

    @property
    def lost(self) -> float:
        """Return the part of q at which log p is not finite."""
        return float(np.exp(self.log_weights) @ [np.mean(~part.finite) for part in self.parts])

    def spread(self) -> float:
        """Return the variance of log p - log q under q: between components, and within them."""
        if not np.isfinite(self.rewards).all():
            return np.inf
        within = np.nanvar(self.ratios, axis=1)
        return float(np.exp(self.log_weights) @ (within + (self.rewards - self.elbo) ** 2))


@stored("mixture.moments")
@dataclass(frozen=True)
class MixtureMoments:
    """Whitened moments of each component, and the gap of the mixture."""

    #: Of the target of each component, whitened by it.
    parts: tuple[Moments, ...]
    #: Nats that are left, what Monte Carlo noise alone would make them, and the standard deviation of the difference:
    #: half the squared length of the natural gradient in the Fisher metric of component and draw together.
    gap: float
    floor: float
    floor_sd: float


def evaluate_mixture(density: Density, q: MixtureState, base: BaseDraws, estimator: Estimator) -> MixtureEvaluation:
    """Evaluate log p and its gradient at draws of each component, in one batch."""
    parts, all_ratios, log_p = [], [], []
    for c, part in enumerate(estimator.evaluate_each(density, q.components, base)):
        share, finite = ComponentTarget(density, q, c).share(part.theta), part.finite
        ratios = np.where(finite, part.logp - share.log_q, np.nan)
        reward = float(ratios[finite].mean()) if finite.any() else -np.inf
        logp, grad = part.logp + share.log_share, part.grad + share.score
        parts.append(replace(part, logp=logp, grad=grad, elbo=reward))
        all_ratios.append(ratios)
        log_p.append(np.where(finite, part.logp, np.nan))
    return MixtureEvaluation(base, tuple(parts), np.array(all_ratios), np.array(log_p), q.log_weights)


def mixture_moments(
    density: Density, q: MixtureState, evaluation: MixtureEvaluation, estimator: Estimator, *, stl: bool = True
) -> MixtureMoments:
    """Estimate the moments of each component, and the gap."""
    parts = tuple(
        estimator.moments(ComponentTarget(density, q, c), component, evaluation.base, part, stl=stl)
        for c, (component, part) in enumerate(zip(q.components, evaluation.parts, strict=True))
    )
    weights, rewards = q.weights, evaluation.rewards
    of_replicates = evaluation.replicate_rewards()
    noise_of_weights = np.inf
    if len(of_replicates) > 1:
        centred = of_replicates - (of_replicates @ weights)[:, None]
        noise_of_weights = 0.5 * float(weights @ centred.var(axis=0, ddof=1)) / len(centred)
    return MixtureMoments(
        parts,
        gap=_sum(weights, [m.gap for m in parts]) + 0.5 * float(weights @ (rewards - weights @ rewards) ** 2),
        floor=_sum(weights, [m.floor for m in parts]) + noise_of_weights,
        # Components share their base draws: errors may add up.
        floor_sd=_sum(weights, [m.floor_sd for m in parts]) + noise_of_weights,
    )


def _sum(weights: Array, values: Sequence[float]) -> float:
    """Return a weighted sum in which what has no weight counts nothing, however large."""
    return float(sum(w * v for w, v in zip(weights, values, strict=True) if w > 0.0))


def without_idle(q: MixtureState, evaluation: MixtureEvaluation, tol: float) -> MixtureState:
    """Return a mixture without the components that together cost less than ``tol`` nats, the lightest first.

    Takes no evaluation of log p: the draws of the others tell.
    """
    kept = q
    which = np.arange(q.n_components)
    for c in np.argsort(q.log_weights):
        if kept.n_components == 1:
            break
        fewer = kept.without(which == c)
        rest = which[which != c]
        rewards = _rewards(fewer, evaluation, rest)
        if np.isfinite(rewards).all():  # others may take over what it had
            fewer = fewer.with_weights(fewer.log_weights + rewards)
        elbo = _sum(fewer.weights, list(_rewards(fewer, evaluation, rest)))
        if elbo >= evaluation.elbo - tol:
            kept, which = fewer, rest
    return kept


def _rewards(q: MixtureState, evaluation: MixtureEvaluation, which: NDArray[np.intp]) -> Array:
    """Return the rewards of components that are some of those that were evaluated, in another mixture."""
    ratios = [evaluation.log_p[i] - q.log_density(evaluation.parts[i].theta) for i in which]
    return np.array([np.nanmean(r) if np.isfinite(r).any() else -np.inf for r in ratios])
