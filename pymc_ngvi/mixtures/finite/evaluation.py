"""log p and moments at draws of every component of a mixture, and the nats that are left to gain."""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    BaseDraws,
    Density,
    Estimator,
    Evaluation,
    GaussianState,
    MeanHessian,
    Moments,
    Outer,
    Whitener,
)
from pymc_ngvi.families.mixture import MixtureState

# --- what one component of a mixture approximates: the posterior, less what the other components cover already ---
#
# For :math:`q = \sum_k w_k q_k`, the ELBO as a function of the component :math:`q_c` alone has the natural gradient of
# a single Gaussian whose target is :math:`\log p + \log(q_c / q)`: the posterior times the responsibility of the
# component [1]_. :math:`S_c' = S_c - \rho E_{q_c}[\nabla^2 (\log p - \log q)]` is its natural-parameter step, and its
# ELBO is :math:`E_{q_c}[\log p - \log q]`. So every update and every estimator for Gaussians serves components.
#
# References
# ----------
# .. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
# of
#    exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914


class Share(NamedTuple):
    """What a component sees of q at some points."""

    #: shape (n_draws,).
    log_q: Array
    #: log(q_c / q); shape (n_draws,).
    log_share: Array
    #: Its gradient; shape (n_draws, n_dim).
    score: Array


@dataclass(frozen=True)
class ComponentTarget:
    """The log density that one component of a mixture approximates.

    Parameters
    ----------
    density : Density
        log p.
    mixture : MixtureState
    index : int
        Of the component.
    """

    density: Density
    mixture: MixtureState
    index: int

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.density.n_dim

    @property
    def has_hessian(self) -> bool:
        """Whether log p has second derivatives that can be evaluated."""
        return self.density.has_hessian

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p + log(q_c / q), (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self.density.logp_grad(theta)
        share = self.share(theta)
        return logp + share.log_share, grad + share.score

    def share(self, theta: Array) -> Share:
        """Return log q, log(q_c / q) and the gradient of the latter at the rows of ``theta``."""
        terms, log_q = self.mixture.log_densities(theta)
        log_share = terms[:, self.index] - self.mixture.log_weights[self.index] - log_q
        scores, mean_score = self.scores(theta, np.exp(terms - log_q[:, None]))
        return Share(log_q, log_share, scores[self.index] - mean_score)

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess (log p + log(q_c / q)) over draws of the component."""
        return _ComponentHessian(self, self.density.mean_hessian(theta), theta)

    # --- pieces ---

    @functools.cached_property
    def precisions(self) -> list[Array]:
        """The precision of each component, whitened by this one."""
        return [self.component.whitened_precision(c) for c in self.mixture.components]

    @property
    def component(self) -> GaussianState:
        """The component."""
        return self.mixture.components[self.index]

    def scores(self, theta: Array, responsibilities: Array) -> tuple[Array, Array]:
        """Return the gradients of log q_k, (n_components, n_draws, n_dim), and those of log q, (n_draws, n_dim)."""
        components = self.mixture.components
        scores = np.stack([-c.precision_product(theta - c.location) for c in components])
        return scores, np.einsum("nk,knd->nd", responsibilities, scores)


@dataclass(frozen=True)
class _ComponentHessian(MeanHessian):
    """Dense: the other components add to all entries.

    With s_k and S_k the score and the precision of component k, and s = sum_k r_k s_k, log(q_c / q) adds the mean of
    sum_k r_k (S_k - s_k s_k^T) + s s^T, less S_c.
    """

    target: ComponentTarget
    of_density: MeanHessian
    theta: Array

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        responsibilities = self.target.mixture.responsibilities(self.theta)
        scores, mean_score = self.target.scores(self.theta, responsibilities)
        products = self.of_density.products(directions) - self.target.component.precision_product(directions)
        precise = [c.precision_product(directions) for c in self.target.mixture.components]
        for score, share, of_precision in zip(scores, responsibilities.T, precise, strict=True):
            products += share.mean() * of_precision - (directions @ score.T * share) @ score / len(score)
        return products + (directions @ mean_score.T) @ mean_score / len(mean_score)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return np.diagonal(self.products(np.eye(self.theta.shape[1])))

    def whitened(self, state: Whitener) -> Array:
        """Return A = -C^T H C at draws of the component, as it stores it.

        What the others add to the Hessian has no sparsity of its own: it is projected onto the form of the component in
        the metric of the Fisher information, in which whitened entries are orthogonal.
        """
        responsibilities = self.target.mixture.responsibilities(self.theta)
        scores, mean_score = self.target.scores(self.theta, responsibilities)
        result = state.add_to_diagonal(self.of_density.whitened(state), 1.0)
        for score, share, precision in zip(scores, responsibilities.T, self.target.precisions, strict=True):
            whitened = state.whiten(score)
            result = result + state.outer_mean(Outer(whitened * share[:, None], whitened, 0.0))
            result -= share.mean() * precision
        whitened = state.whiten(mean_score)
        return result - state.outer_mean(Outer(whitened, whitened, 0.0))


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
