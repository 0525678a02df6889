r"""The step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region.

First one Gaussian is fitted, by the rule `adaptive`. Then modes are looked for from dispersed points; components are
placed there, and, one by one, where p has most mass that q lacks. Every mixture is solved on fixed draws, as many from
each component, where the ELBO must not fall; what gains no more than its noise on fresh draws is undone. Last, steps
are averaged over fresh sets, which tell what is left to gain.
"""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import numpy as np

from scipy.special import entr

from pymc_ngvi.core.climbs import ascend
from pymc_ngvi.core.draws import base_of, chunks, draws_of
from pymc_ngvi.core.importance import MIN_KHAT_DRAWS, weigh
from pymc_ngvi.core.linalg import TINY, logsumexp
from pymc_ngvi.core.sizes import ASSESSMENT, seed_of
from pymc_ngvi.core.status import Elbo, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Density,
    Evaluation,
    GaussianState,
    Indices,
    MeanHessian,
    Outer,
    StepRule,
    Target,
    VariationalState,
    WhitenedHessian,
)
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.methods.adaptive import Adaptive, AdaptiveState
from pymc_ngvi.methods.estimators import Estimator, Moments, Nats, Update
from pymc_ngvi.methods.schedule import (
    FEW_DRAWS,
    MAX_LOST,
    TOL,
    Schedule,
    ScheduleState,
    Step,
    is_kinked,
    longest_step,
)

# --- whether a mixture was worth it: what it gains over the single Gaussian that it began from ---

#: Standard errors that a gain has to exceed.
_N_SE = 2.0


def effective_components(weights: Array) -> float:
    """Return the effective number of components: the exponential of the entropy of the weights.

    Parameters
    ----------
    weights : ndarray, shape (n_components,)
        Their sum is 1.

    Returns
    -------
    float
        From 1 (one has all the weight) to n_components (all are equal).

    Examples
    --------
    >>> import numpy as np
    >>> effective_components(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    return float(np.exp(entr(weights).sum()))


@dataclass(frozen=True)
class Worth:
    """What a mixture gains over one Gaussian.

    Parameters
    ----------
    gain, se : float
        Nats of ELBO, and the Monte Carlo standard error; NaN where no draw of both has a finite log density.
    n_components : int
    n_effective : float
        Exponential of the entropy of the weights.
    n_draws : int
        Behind each figure.
    khat, khat_gaussian : float or None
        Pareto k-hat of the mixture and of the Gaussian; None for fewer than 100 draws.

    usable, usable_gaussian : bool
        Whether estimates can be weighted by draws of these.

    Examples
    --------
    >>> worth = Worth(1.21, 0.05, 3, 2.91, 10_000, khat=0.41, khat_gaussian=1.02)
    >>> for part in worth.sentence().split("; "):
    ...     print(part)
    With 2.9 effective components, the mixture gains 1.21 +- 0.05 nats over one Gaussian
    k-hat was 1.02 and is 0.41: worth it.
    """

    gain: float
    se: float
    n_components: int
    n_effective: float
    n_draws: int
    khat: float | None = None
    khat_gaussian: float | None = None
    usable: bool = True
    usable_gaussian: bool = False

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence()

    @property
    def significant(self) -> bool:
        """Whether the gain is positive beyond its error."""
        return self.gain > _N_SE * self.se

    def sentence(self) -> str:
        """Return in one line what was gained, and whether it was worth it."""
        if np.isnan(self.gain):
            return "What the mixture gains over one Gaussian is not known: log p is not finite at their draws."
        amount = f"{Elbo(abs(self.gain), self.se)} nats"
        if self.gain < -_N_SE * self.se:
            return (
                f"The mixture is {amount} worse than the one Gaussian that it began from: go on with approx.refine(n), "
                "or take the Gaussian."
            )
        if self.n_components == 1:
            gained = f"gains {amount} over" if self.significant else "gains nothing over"
            return (
                f"One component is left of the mixture, which {gained} the Gaussian that it began from: not worth it, "
                "a fit without family='mixture' is the same."
            )
        number = f"{self.n_effective:.1f}"
        within = "" if self.significant else ", within the error"
        khats = "" if self.khat is None else f"; k-hat was {self.khat_gaussian:.2f} and is {self.khat:.2f}"
        return (
            f"With {number} effective component{'s'[: number != '1.0']}, the mixture gains "
            f"{Elbo(self.gain, self.se)} nats over one Gaussian{within}{khats}: {self._verdict()}."
        )

    def _verdict(self) -> str:
        if self.significant and self.gain >= TOL:
            return "worth it" if self.usable else "worth it for the bulk of the posterior, but not for its tails"
        if self.khat is not None and self.usable and not self.usable_gaussian:
            return "worth it for importance weights alone"
        return "not worth it, one Gaussian is enough"


def worth_between(
    mixture: MixtureState, gaussian: VariationalState, density: ModelDensity, n_draws: int, rng: np.random.Generator
) -> Worth:
    """Return what a mixture gains over a Gaussian, from draws of both that are made of the same standard normals."""
    found, done = np.empty((2, 2, n_draws)), 0  # of mixture and Gaussian: log p, log q
    for size in chunks(n_draws, mixture.n_dim):
        base, now = base_of(mixture, size, rng), slice(done, done + size)
        for of, state in zip(found, (mixture, gaussian), strict=True):
            theta = state.draws(base[:, : mixture.n_dim + state.n_uniform])
            of[:, now] = density.logp(theta), state.log_density(theta)
        done += size
    return worth_of(mixture.weights, *found)


def worth_of(weights: Array, mixture: Array, gaussian: Array) -> Worth:
    """Return what a mixture gains, from log densities at its draws and at those of a Gaussian.

    Parameters
    ----------
    weights : ndarray, shape (n_components,)
    mixture, gaussian : ndarray, shape (2, n_draws)
        log p, up to a constant, and log q, at draws of each; where equal columns have equal base draws, the noise that
        both share cancels. Columns that are not finite in either are left out of the gain.

    Returns
    -------
    Worth
    """
    with np.errstate(invalid="ignore"):  # -inf less -inf
        difference = (mixture[0] - mixture[1]) - (gaussian[0] - gaussian[1])
    difference = difference[np.isfinite(difference)]
    n_draws, n_kept = mixture.shape[1], len(difference)
    gain = float(difference.mean()) if n_kept else np.nan
    se = float(difference.std(ddof=1) / np.sqrt(n_kept)) if n_kept > 1 else np.inf
    number = len(weights), effective_components(weights), n_draws
    if n_draws < MIN_KHAT_DRAWS:
        return Worth(gain, se, *number)
    both = [weigh(*of)[1] for of in (mixture, gaussian)]
    usable = [of.verdict().helps for of in both]
    return Worth(gain, se, *number, both[0].khat, both[1].khat, *usable)


# --- where components may begin: at modes of log p found from dispersed points, and where q has too little mass ---

#: Points that ascend log p together.
_N_POINTS = 128
#: Scales of the starting points, in those of the start, which count as this at least.
_SCALES, _LEAST_START = (1.0, 0.5), 1.0
#: A component starts no wider than so many scales of the start, and no narrower than a part of them.
_WIDEST, _NARROWEST = 10.0, 1e-6
#: Mahalanobis distance per root dimension below which two ends of an ascent count as one mode.
_SAME = 0.5
#: Log of the part of all mass that a mode needs to be worth a component.
_LEAST_LOG_MASS = -12.0
#: Draws among which the place of a new component is looked for, and how much wider than q they are.
_N_CANDIDATES, _INFLATIONS = 512, (1.0, 1.5, 3.0)
#: Smallest and largest relative precision of a new component, in the coordinates of the one it begins beside.
_LEAST_TIGHT, _MOST_TIGHT = 1.0, 1e4
#: Multiples of the least precision to add, one after the other, until a curvature is positive definite.
_RAISED = 0.1 * 10.0 ** np.arange(6)
#: Weight at which a new component starts.
_LIGHT, _HEAVY = 0.02, 0.5


def modes(
    density: Density, around: AnyGaussian, extra: Array, rng: np.random.Generator, n_most: int
) -> tuple[list[AnyGaussian], Array]:
    """Look for modes of log p from dispersed points, and make a component of each."""
    # A start that was shrunk, so that a single Gaussian has a good one, is no place to look around from.
    around = around.with_scale(around.location, np.maximum(around.sd(), _LEAST_START))
    normals = rng.standard_normal((len(_SCALES), _N_POINTS, density.n_dim))
    points = [around.draws(scale * z) for scale, z in zip(_SCALES, normals, strict=True)]
    ends, logp = ascend(density, np.concatenate([points[0], extra, *points[1:]]))
    found, _ = distinct(ends, logp, lambda i: local_component(density, around, ends[i]), 4 * n_most + 8)
    log_mass = np.array([float(logp[i] - about.log_density(ends[i][None])[0]) for i, about in found])
    order = np.argsort(-log_mass)[:n_most]
    order = order[log_mass[order] > log_mass.max(initial=-np.inf) + _LEAST_LOG_MASS]
    return [found[i][1] for i in order], log_mass[order]


def distinct[Q: GaussianState](
    ends: Array, logp: Array, make: Callable[[int], Q | None], most: int
) -> tuple[list[tuple[int, Q]], Indices]:
    """Return the ends that no higher one is near, with Gaussians about them, and which of them each end is."""
    found, which = list[tuple[int, Q]](), np.full(len(ends), -1)
    for i in np.argsort(-logp)[: np.isfinite(logp).sum()]:
        known = next((k for k, (_, about) in enumerate(found) if is_at(about, ends[i])), -1)
        if known < 0 and len(found) < most and (about := make(int(i))) is not None:
            known = len(found)
            found.append((int(i), about))
        which[i] = known
    return found, which


def is_at(component: GaussianState, point: Array) -> bool:
    """Tell whether a point is near the mean of a component, in its own units."""
    apart = (point - component.location)[None]
    return bool(float(apart[0] @ component.precision_product(apart)[0]) < _SAME**2 * component.n_dim)


def local_component(
    density: Density,
    like: AnyGaussian,
    point: Array,
    tightness: tuple[float, float] | None = None,
    mean_hessian: Callable[[Array], MeanHessian] | None = None,
) -> AnyGaussian | None:
    """Return a Gaussian about a point with the curvature of log p there, or one that is given, kept within limits."""
    least, most = tightness or (_WIDEST**-2, _NARROWEST**-2)
    here = replace(like, location=point)
    if not density.has_hessian and mean_hessian is None:
        return here
    curvature = (mean_hessian or density.mean_hessian)(point[None]).whitened(here)
    nowhere = np.zeros(len(point))
    scaled = here.precision_scaled_by_function(curvature, lambda a: np.clip(a, least, most), nowhere)
    if scaled is None:  # a form that eigenvalues do not keep: as much of the identity as it takes
        raised = (here.add_to_diagonal(curvature, by) for by in least * _RAISED)
        scaled = next(filter(None, (here.precision_scaled_by(matrix, nowhere) for matrix in raised)), None)
    return None if scaled is None else scaled[0]


def addition(
    density: Density, q: MixtureState, rng: np.random.Generator, tried: list[Array], log_evidence: float
) -> MixtureState | None:
    """Return q with one more component, where p has most mass that q lacks."""
    thetas, parents = _candidates(q, rng)
    logp = density.logp_grad(thetas)[0]
    log_ratio = logp - q.log_density(thetas) - log_evidence
    # log (p - q), in units of the mass that a component like the parent has: what it could gain.
    size = np.array([-float(c.log_density(c.location[None])[0]) for c in q.components])[parents]
    with np.errstate(all="ignore"):
        excess = np.where(log_ratio > 0.0, logp + np.log1p(-np.exp(-log_ratio)) + size, -np.inf)
    excess[~np.isfinite(excess)] = -np.inf
    for row in np.argsort(-excess)[:_N_POINTS]:
        if excess[row] == -np.inf:
            return None
        parent = q.components[parents[row]]
        if any(is_at(replace(parent, location=place), thetas[row]) for place in tried):
            continue
        tried.append(thetas[row])
        component = local_component(density, parent, thetas[row], (_LEAST_TIGHT, _MOST_TIGHT))
        if component is not None:
            log_mass = float(logp[row]) - float(component.log_density(thetas[row][None])[0]) - log_evidence
            return q.joined(component, float(np.clip(log_mass, *np.log([_LIGHT, _HEAVY]))))
    return None


def _candidates(q: MixtureState, rng: np.random.Generator) -> tuple[Array, Indices]:
    """Return draws of q and of wider versions of it, with the component of each."""
    thetas, parents = [], []
    for inflation in _INFLATIONS:
        chosen = rng.choice(q.n_components, size=_N_CANDIDATES, p=np.exp(q.log_weights - logsumexp(q.log_weights)))
        z = inflation * rng.standard_normal((_N_CANDIDATES, q.n_dim))
        for c in np.unique(chosen):
            rows = chosen == c
            thetas.append(q.components[c].draws(z[rows]))
            parents.append(np.full(rows.sum(), c))
    return np.concatenate(thetas), np.concatenate(parents)


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
#    of exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914


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
        _, log_share, score = self.share(theta)
        return logp + log_share, grad + score

    def share(self, theta: Array) -> tuple[Array, Array, Array]:
        """Return log q and log(q_c / q), (n_draws,), and the gradient of the latter, (n_draws, n_dim)."""
        terms, log_q = self.mixture.log_densities(theta)
        log_share = terms[:, self.index] - self.mixture.log_weights[self.index] - log_q
        scores, mean_score = self.scores(theta, np.exp(terms - log_q[:, None]))
        return log_q, log_share, scores[self.index] - mean_score

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess (log p + log(q_c / q)) over draws of the component."""
        return WhitenedHessian(functools.partial(self._whitened, self.density.mean_hessian(theta), theta))

    def _whitened(self, of_density: MeanHessian, theta: Array, state: GaussianState) -> Array:
        """Return A = -C^T H C at draws of the component, as it stores it.

        With s_k and S_k the score and the precision of component k, and s = sum_k r_k s_k, log(q_c / q) adds the mean
        of sum_k r_k (S_k - s_k s_k^T) + s s^T, less S_c. That has no sparsity of its own: it is projected onto the form
        of the component in the metric of the Fisher information, in which whitened entries are orthogonal.
        """
        responsibilities = self.mixture.responsibilities(theta)
        scores, mean_score = self.scores(theta, responsibilities)
        result = state.add_to_diagonal(of_density.whitened(state), 1.0)
        for score, share, precision in zip(scores, responsibilities.T, self.precisions, strict=True):
            whitened = state.whiten(score)
            result = result + state.outer_mean(Outer(whitened * share[:, None], whitened, 0.0))
            result -= share.mean() * precision
        whitened = state.whiten(mean_score)
        return result - state.outer_mean(Outer(whitened, whitened, 0.0))

    # --- pieces ---

    @functools.cached_property
    def precisions(self) -> list[Array]:
        """The precision of each component, whitened by this one."""
        return [self.component.whitened_precision(c) for c in self.mixture.components]

    @property
    def component(self) -> AnyGaussian:
        """The component."""
        return self.mixture.components[self.index]

    def scores(self, theta: Array, responsibilities: Array) -> tuple[Array, Array]:
        """Return the gradients of log q_k, (n_components, n_draws, n_dim), and those of log q, (n_draws, n_dim)."""
        scores = np.stack([-c.precision_product(theta - c.location) for c in self.mixture.components])
        return scores, np.einsum("nk,knd->nd", responsibilities, scores)


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
        squares = np.nanvar(self.ratios, axis=1) + (self.rewards - self.elbo) ** 2
        return float(np.exp(self.log_weights) @ squares)


@stored("mixture.moments")
@dataclass(frozen=True)
class MixtureMoments(Nats):
    """Whitened moments of each component, and the gap of the mixture in the Fisher metric of component and draw."""

    #: Of the target of each component, whitened by it.
    parts: tuple[Moments, ...]


def evaluate_mixture(density: Density, q: MixtureState, base: BaseDraws, estimator: Estimator) -> MixtureEvaluation:
    """Evaluate log p and its gradient at draws of each component, in one batch."""
    parts, all_ratios, log_p = [], [], []
    for c, part in enumerate(estimator.evaluate_each(density, q.components, base)):
        log_q, log_share, score = ComponentTarget(density, q, c).share(part.theta)
        finite = part.finite
        ratios = np.where(finite, part.logp - log_q, np.nan)
        reward = float(ratios[finite].mean()) if finite.any() else -np.inf
        parts.append(replace(part, logp=part.logp + log_share, grad=part.grad + score, elbo=reward))
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
            fewer = MixtureState.of(fewer.components, fewer.log_weights + rewards)
        elbo = _sum(fewer.weights, list(_rewards(fewer, evaluation, rest)))
        if elbo >= evaluation.elbo - tol:
            kept, which = fewer, rest
    return kept


def _rewards(q: MixtureState, evaluation: MixtureEvaluation, which: Indices) -> Array:
    """Return the rewards of components that are some of those that were evaluated, in another mixture."""
    ratios = [evaluation.log_p[i] - q.log_density(evaluation.parts[i].theta) for i in which]
    return np.array([np.nanmean(r) if np.isfinite(r).any() else -np.inf for r in ratios])


# --- one step of a mixture within a trust region: each component, and the weights, moves by so many nats at most ---
# A natural step of size :math:`\rho` of one component is shortened until KL(new || old) is within the radius [1]_, so
# that a component with a strange moment can't run away with the rest; likewise the weights.
#
# In the Fisher metric of component and draw together, the natural gradient with respect to the log weights is
# :math:`R_c = E_{q_c}[\log p - \log q]`, up to a constant [2]_: :math:`\log w_c' = \log w_c + \rho R_c`, normalised. A
# step of size 1 is exact for components that do not overlap.
#
# References
# ----------
# .. [1] O. Arenz, P. Dahlinger, Z. Ye, M. Volpp and G. Neumann (2023). A unified perspective on natural gradient
#    variational inference with Gaussian mixture models. TMLR. https://doi.org/10.48550/arXiv.2209.11533
# .. [2] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
#    of exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914

#: Least log weight of a component: far below it, nothing could raise it again.
LEAST_LOG_WEIGHT = -69.0


def moved_within(
    radius: float, update: Update, q: MixtureState, rewards: Array, moments: Sequence[Moments], step_size: float
) -> MixtureState:
    """Return the mixture after one step of every component and of the weights."""
    components = tuple(
        _component_within(radius, update, component, of_it, step_size)
        for component, of_it in zip(q.components, moments, strict=True)
    )
    # A component that lies where log p is not finite loses its weight.
    lowest = np.min(rewards, where=np.isfinite(rewards), initial=0.0) + LEAST_LOG_WEIGHT
    rewards, before = np.where(np.isfinite(rewards), rewards, lowest), q.log_weights

    def weights_within(part: float) -> Array | None:
        new = stepped_weights(before, rewards, part * step_size)
        return new if float(np.exp(new) @ (new - before)) <= radius else None

    found = longest_step(weights_within)
    return MixtureState(before if found is None else found[0], components)


def _component_within(
    radius: float, update: Update, component: AnyGaussian, moments: Moments, rho: float
) -> AnyGaussian:
    def moved(part: float) -> AnyGaussian | None:
        new = update(component, moments, part * rho, True)
        return new if new is not None and new.divergence(component) <= radius else None

    found = longest_step(moved)
    return component if found is None else found[0]


def stepped_weights(log_weights: Array, direction: Array, step_size: float) -> Array:
    """Return the log weights after a step, normalised, none below the least."""
    new = log_weights + step_size * (direction - direction.max())
    new = np.maximum(new - logsumexp(new), LEAST_LOG_WEIGHT)
    return new - logsumexp(new)


# --- steps of a mixture: on fixed draws, as many from each component, within a trust region; then averaged ---

#: Nats within which components and weights move at first, at most, and the factor by which it is raised and lowered.
_RADIUS, _MIN_RADIUS, _LONGER, _SHORTER = 1.0, 1e-6, 2.0, 4.0
#: Weight below which a component is dropped: it costs as many nats.
_NEGLIGIBLE = 1e-4
#: Sets that steps are averaged over, and steps among them that fresh draws may refuse, at most.
_MAX_AVERAGED, _MAX_REFUSED = 12, 2
#: Standard deviations, relative to those of the single Gaussian, beyond which a component has collapsed or run away.
_LEAST_SCALE, _MOST_SCALE = 1e-8, 1e6


@stored("mixture.steps")
@dataclass(frozen=True)
class MixtureSteps(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows."""

    q: MixtureState
    evaluation: MixtureEvaluation
    moments: MixtureMoments
    #: The Gaussian that the mixture began from.
    single: AnyGaussian | None = None
    #: Not yet known to pay: once its sets are solved, it waits for a decision.
    is_candidate: bool = True
    #: It does so now.
    waits: bool = False
    #: Why there is no going on: a component has collapsed or run away, or no draw is finite.
    failure: Status | None = None
    #: ELBO of the accepted mixture, where this is a candidate.
    to_beat: float = -np.inf
    #: Of the trust region, nats.
    radius: float = _RADIUS
    #: Averaged steps that would have lowered the ELBO.
    n_refused: int = 0


class MixtureSchedule(Schedule[MixtureSteps, MixtureState, MixtureEvaluation]):
    """Steps of a mixture of so many components."""

    default_draws = (16, 128)
    max_idle = 40  # a candidate may go down
    counts_all = True
    state, stream = MixtureSteps, (7,)

    def __init__(self, target: Density, update: Update, estimator: Estimator, **options: Any) -> None:
        super().__init__(target, update, estimator, **options)
        self._max_draws = self._n_draws << int(np.log2(self._max_draws // self._n_draws))
        self.few_draws = min(FEW_DRAWS, self._max_draws)
        #: Draws of each component: to begin averaging with, and in the largest set.
        self.draws_at_end, self.most_draws = max(self._max_draws // 2, self._n_draws), self._max_draws

    def evaluated(self, q: MixtureState, base: BaseDraws) -> MixtureEvaluation:
        """Return log p at draws of each component."""
        return evaluate_mixture(self._target, q, base, self._estimator)

    def at(self, q: MixtureState, level: int, n_draws: int) -> tuple[MixtureState, BaseDraws, MixtureEvaluation]:
        """Evaluate a mixture, without components of which no draw has a finite log density, if others have."""
        base = self.base_draws(level, n_draws)
        evaluation = self.evaluated(q, base)
        lost = ~np.isfinite(evaluation.rewards)
        return self.at(q.without(lost), level, n_draws) if lost.any() and not lost.all() else (q, base, evaluation)

    def moments(self, q: MixtureState, base: BaseDraws, evaluation: MixtureEvaluation) -> MixtureMoments:
        """Return what is left to gain, and along what."""
        return mixture_moments(self._target, q, evaluation, self._estimator, stl=self._stl)

    def larger(self, state: MixtureSteps) -> MixtureSteps | None:
        """Return a candidate on a larger set; None where it has the largest."""
        more = 2 * state.n_draws
        return self._redraw(replace(state, waits=False, idle=0), more) if more <= self._max_draws else None

    def terminate(self, state: MixtureSteps) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.failure is not None or self._is_certified(state):
            return state.failure or Status.CONVERGED
        return Status.NOISE_LIMITED if state.rounds > _MAX_AVERAGED or state.n_refused >= _MAX_REFUSED else None

    def reopen(self, state: MixtureSteps) -> MixtureSteps:
        """Return a state in which a fit that gave up may try again."""
        return replace(state, rounds=0, n_refused=0)

    # --- how a mixture is measured --------------------------------------------------------------------------------

    def _is_near(self, state: MixtureSteps, gap: float) -> bool:
        return True

    def _spread(self, state: MixtureSteps) -> float:
        return state.evaluation.spread()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _found(self, state: MixtureSteps) -> tuple[MixtureSteps, Step[MixtureState, MixtureEvaluation] | Status]:
        radius = state.radius
        while radius > _MIN_RADIUS:
            q = self._moved(state, 1.0, radius)
            evaluation = self.evaluated(q, state.base)
            if self._accepts(state, evaluation):
                if self._is_lost(q, state.single):
                    return replace(state, failure=Status.COLLAPSED), Status.STALLED
                return replace(state, radius=radius * _LONGER), Step(q, evaluation, 1.0)
            radius /= _SHORTER
        return state, Status.STALLED

    def _accepts(self, state: MixtureSteps, new: MixtureEvaluation) -> bool:
        # Few draws are overfitted: a candidate may lose on its own what it has gained there over the accepted mixture.
        least = (state.to_beat if state.is_candidate else state.elbo) - self._slack(state)
        return bool(new.n_dropped <= state.evaluation.n_dropped and new.elbo >= least)

    def _is_lost(self, q: MixtureState, single: AnyGaussian | None) -> bool:
        if single is None:
            return False
        unit = single.sd()
        ratio, far = q.sds / unit, np.abs(q.means - single.location) / unit
        return bool(ratio.min() < _LEAST_SCALE or max(ratio.max(), far.max()) > _MOST_SCALE)

    def _left(self, state: MixtureSteps) -> MixtureSteps:
        # Where components overlap, the metric is too large, and more is left than the gap tells: one more step.
        return state

    def _next_set(self, state: MixtureSteps) -> MixtureSteps:
        if state.failure is not None:
            return replace(state, waits=True)
        drop = state.q.weights < _NEGLIGIBLE
        state = replace(state, q=state.q.without(drop)) if drop.any() else state
        if not state.is_candidate:
            return super()._next_set(state)
        if state.n_draws >= self.few_draws:
            return replace(state, waits=True)
        return self._redraw(replace(state, idle=0), 2 * state.n_draws)

    def _redraw(self, state: MixtureSteps, n_draws: int) -> MixtureSteps:
        new = super()._redraw(state, n_draws)
        # No draw of any component is finite: nothing can be said of this mixture.
        return replace(new, waits=True, failure=Status.OUTSIDE_SUPPORT) if new.level == state.level else new

    def _averaged(self, state: MixtureSteps, rho: float) -> MixtureSteps:
        return self._pooled(state, self._moved(state, rho, _RADIUS), rho)

    def _moved(self, state: MixtureSteps, rho: float, radius: float) -> MixtureState:
        return moved_within(radius, self._update, state.q, state.evaluation.rewards, state.moments.parts, rho)

    def _average(self, state: MixtureSteps) -> MixtureSteps | None:
        """Take the step that pools this set with all before it, unless fresh draws say that it does harm."""
        new = super()._average(state)
        if new is None:
            return None
        before = self.evaluated(state.q, new.base)
        if new.elbo >= before.elbo - self.tolerance.most(state.q):
            return new
        kept = self._measured(replace(new, q=state.q, evaluation=before, n_refused=state.n_refused + 1))
        return replace(kept, n_pooled=state.n_pooled, belief=state.belief.measured(kept.moments))

    def _creeps(self, state: MixtureSteps, new: MixtureSteps) -> bool:
        return False  # a mixture that is accepted is not to be fitted to single sets again

    def _most_left(self, state: MixtureSteps) -> float:
        # The error of a gap is an upper bound: those of components are added up.
        return state.moments.gap - state.moments.floor + state.moments.floor_sd


# --- what one iteration of the step rule `trust_region` hands to the next ---

Stage = Literal["gaussian", "search", "solve", "grow", "average"]


@stored("mixture.accepted")
@dataclass(frozen=True)
class Accepted:
    """The best mixture so far, and its ELBO on fresh draws with the standard error."""

    q: MixtureState
    elbo: float
    se: float
    #: Variance of log p - log q under q.
    spread: float
    #: Part of q at which log p is not finite.
    lost: float


@stored("mixture.fit")
@dataclass(frozen=True)
class MixtureFit:
    """What one iteration hands to the next."""

    #: What the next step does.
    stage: Stage
    #: The start, from which modes are looked for.
    start: AnyGaussian
    #: Of the single Gaussian.
    of_gaussian: AdaptiveState
    #: Of the mixture under way: a candidate, before it is known whether it pays, or the accepted one at the end.
    of_mixture: MixtureSteps | None = None
    #: The single Gaussian, once it is fitted.
    gaussian: AnyGaussian | None = None
    #: The best mixture so far.
    accepted: Accepted | None = None
    #: Names the random stream of the current draws.
    level: int = 0
    #: Steps of the single Gaussian, candidates in a row that did not pay, and those of which a component collapsed or
    #: ran away.
    n_steps: int = 0
    n_failed: int = 0
    n_collapsed: int = 0
    #: Draws left out in earlier parts of the fit.
    n_lost: int = 0
    #: Where components were added to the accepted mixture.
    tried: tuple[Array, ...] = ()
    #: Why to stop.
    status: Status | None = None

    @property
    def q(self) -> MixtureState:
        """The approximation if the fit ended here: no candidate that may not pay."""
        q = self._kept.q
        return q if isinstance(q, MixtureState) else MixtureState.of([q])

    @property
    def elbo(self) -> float:
        """ELBO of ``q``: on the current draws, or, where a candidate is on trial, as measured when it was accepted."""
        return self._kept.elbo

    @property
    def _kept(self) -> "Accepted | AdaptiveState | MixtureSteps":
        return self._under_way if self.accepted is None or self.stage == "average" else self.accepted

    @property
    def gap(self) -> float:
        """Estimated nats that ``q`` still lacks; NaN where a candidate is on trial."""
        return self._under_way.gap if self.stage in ("gaussian", "search", "average") else np.nan

    @property
    def n_draws(self) -> int:
        """Draws in use, of all components together."""
        of = self.of_mixture
        return self.of_gaussian.n_draws if of is None else of.n_draws * of.q.n_components

    @property
    def step_size(self) -> float:
        """The last step size."""
        return self._under_way.step_size

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""
        return self.n_lost + self._under_way.n_dropped

    @property
    def _under_way(self) -> AdaptiveState | MixtureSteps:
        return self.of_gaussian if self.of_mixture is None else self.of_mixture


# --- the step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region ---

#: Times the largest set, to compare: gradients are cheap, and what a component gains may be little.
_MANY = 4
#: Draws of the mixture behind the ELBO at the end.
_N_ASSESSED = 1_024
#: Draws of the single Gaussian in the largest set, where it is but the beginning.
_GAUSSIAN_DRAWS = 256
#: Points around the Gaussian, and draws of the prior, from which modes are looked for, beside those around the start.
_N_AROUND, _N_PRIOR = 32, 64
#: Iterations of the single Gaussian, at most.
_MAX_GAUSSIAN = 200
#: Components of n_components="auto", at most, and candidates in a row that may fail.
_MOST, _MAX_FAILED = 30, 3
#: Weight from which kinks under a component count.
_WEIGHTY = 0.1
#: Part of the tolerance that components that are dropped together may cost.
_IDLE = 0.5
#: Random stream of searches.
_SEARCH_LEVEL = 3 * ASSESSMENT


class TrustRegion(StepRule[MixtureState, MixtureFit]):
    """Mixtures of Gaussians: components found, added, fitted and dropped.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries, applied to each component.
    n_components : int or "auto", default "auto"
    **options
        Of `Schedule`: numbers of draws are those of each component, 16 and 128 by default; ``tol`` is also what a
        component should gain.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = Schedule.takes | {"n_components"}

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        n_components: int | str = "auto",
        **options: Any,
    ) -> None:
        self._auto = n_components == "auto"
        self._n_components = _MOST if n_components == "auto" else int(n_components)
        self._steps = MixtureSchedule(target, update, estimator, **options)
        if self._n_components > 1 and options.get("max_draws") is None:
            # What the Gaussian lacks by the noise of few draws, the mixture that begins from it makes good.
            options["max_draws"] = max(_GAUSSIAN_DRAWS, options.get("n_draws") or 0)
        self._gaussian = Adaptive(target, update, estimator, **options)
        self._target, self._seed, self._tolerance = target, self._steps.seed, self._steps.tolerance
        self._worth = self._tolerance.tol

    def first_evaluation(self, q: MixtureState) -> Evaluation:
        """Evaluate a start, of one component, on the first base draws."""
        return self._gaussian.first_evaluation(q.components[0])

    def init(self, q: MixtureState) -> MixtureFit:
        """Return the state before the first iteration."""
        return MixtureFit("gaussian", q.components[0], self._gaussian.init(q.components[0]))

    def step(self, state: MixtureFit) -> MixtureFit:
        """Do one thing: a step, a search, a decision."""
        return {
            "gaussian": self._fit_gaussian,
            "search": self._search,
            "solve": self._solve,
            "grow": self._grow,
            "average": self._average,
        }[state.stage](state)

    def terminate(self, state: MixtureFit) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.stage == "gaussian" and self._n_components == 1:
            return self._gaussian.terminate(state.of_gaussian)
        if state.status is not None or state.stage != "average" or state.of_mixture is None:
            return state.status
        status = self._steps.terminate(state.of_mixture)
        return Status.COLLAPSED if status is Status.CONVERGED and state.n_collapsed else status

    def assess(self, state: MixtureFit) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        theta = draws_of(state.q, _N_ASSESSED, np.random.default_rng([self._seed, ASSESSMENT]))
        logp, units = self._target.logp_grad(theta)[0], np.arange(_N_ASSESSED)[:, None]
        q, base, measured = self._steps.at(state.q, 2 * ASSESSMENT + state.level, self._steps.most_draws)
        if not np.isfinite(measured.rewards).all():
            return Assessment(theta, logp, units, np.nan, np.inf, Status.OUTSIDE_SUPPORT)
        moments = self._steps.moments(q, base, measured)
        gap = max(moments.gap - moments.floor, 0.0) if np.isfinite(moments.floor) else np.nan
        # What speaks against a fit that seems to have converged: lost draws, and kinks.
        kinked = [
            is_kinked(component, base, part, of_part)
            for component, part, of_part, w in zip(q.components, measured.parts, moments.parts, q.weights, strict=True)
            if w >= _WEIGHTY
        ]
        against = Status.NOT_SMOOTH if any(kinked) else None
        against = Status.OUTSIDE_SUPPORT if measured.lost > MAX_LOST else against
        if against is None and gap - 2.0 * moments.floor_sd > 2.0 * self._tolerance.most(q):
            against = Status.NOISE_LIMITED
        return Assessment(theta, logp, units, gap, moments.floor_sd, against)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        return assessment.against or status if status in (Status.CONVERGED, Status.NOISE_LIMITED) else status

    def reopen(self, state: MixtureFit) -> MixtureFit:
        """Return a state in which a fit that ended may try again."""
        state = replace(state, status=None)
        if state.stage == "gaussian":
            return replace(state, n_steps=0, of_gaussian=self._gaussian.reopen(state.of_gaussian))
        if state.stage == "average" and state.of_mixture is not None:
            return replace(state, of_mixture=self._steps.reopen(state.of_mixture))
        return self._polish(state)

    # --- one Gaussian -------------------------------------------------------------------------------------------------

    def _fit_gaussian(self, state: MixtureFit) -> MixtureFit:
        inner = self._gaussian.step(state.of_gaussian)
        moved = replace(state, of_gaussian=inner, n_steps=state.n_steps + 1)
        if self._n_components == 1:
            return replace(moved, gaussian=inner.q)
        if self._gaussian.terminate(inner) is None and moved.n_steps < _MAX_GAUSSIAN:
            return moved
        return replace(moved, stage="search")

    # --- components ---------------------------------------------------------------------------------------------------

    def _search(self, state: MixtureFit) -> MixtureFit:
        """Keep the Gaussian, and begin a mixture at the modes, if there are more than one."""
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL])
        gaussian = state.of_gaussian.q
        accepted = self._accept(state, MixtureState.of([gaussian]))
        extra = [gaussian.draws(3.0 * rng.standard_normal((_N_AROUND, self._target.n_dim)))]
        if hasattr(self._target, "prior_draws"):
            extra.append(self._target.prior_draws(_N_PRIOR, seed_of(rng)))
        found, log_mass = modes(self._target, state.start, np.concatenate(extra), rng, self._n_components)
        known = replace(state, accepted=accepted, gaussian=gaussian, level=state.level + 1)
        return self._begin(known, MixtureState.of(found, log_mass)) if len(found) > 1 else replace(known, stage="grow")

    def _grow(self, state: MixtureFit) -> MixtureFit:
        """Add the component that promises most to the accepted mixture, or go on to the end."""
        accepted = cast(Accepted, state.accepted)
        full = accepted.q.n_components >= self._n_components
        # Half the spread is about what all components together could gain.
        near = self._auto and accepted.spread < self._worth
        if full or near or state.n_failed >= _MAX_FAILED:
            return self._polish(state)
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL, state.level])
        if state.n_failed % 2:  # where an addition failed, a component in two halves may serve
            level, n_draws = _SEARCH_LEVEL + state.level, self._steps.most_draws
            measured = self._steps.evaluated(accepted.q, self._steps.base_draws(level, n_draws))
            halved = split(accepted.q, measured, state.n_failed // 2)
            if halved is not None:
                return self._begin(replace(state, level=state.level + 1), halved)
        tried = list(state.tried)
        new = addition(self._target, accepted.q, rng, tried, accepted.elbo)
        return self._polish(state) if new is None else self._begin(replace(state, tried=tuple(tried)), new)

    def _begin(self, state: MixtureFit, q: MixtureState) -> MixtureFit:
        """Put a candidate on trial."""
        level, n_lost = state.level + 1, state.n_dropped
        begun = self._steps.begin(q, level, single=state.gaussian)
        moved = replace(state, stage="solve", level=level, of_mixture=begun, n_lost=n_lost)
        if begun is None:
            return self._failed(moved)
        return replace(moved, of_mixture=replace(begun, to_beat=cast(Accepted, state.accepted).elbo))

    def _solve(self, state: MixtureFit) -> MixtureFit:
        """Take a step of the candidate; decide on it once it is solved."""
        inner = cast(MixtureSteps, state.of_mixture)
        if not inner.waits:
            inner = self._steps.step(inner)
            return replace(state, of_mixture=inner, level=inner.level)
        if inner.failure is None:
            old, new = cast(Accepted, state.accepted), self._accept(state, inner.q)
            gain, noise = new.elbo - old.elbo, 2.0 * np.hypot(new.se, old.se)
            if new.lost > max(old.lost, MAX_LOST):  # what lies outside the support counts nowhere in its ELBO
                return self._failed(state)
            grows = not self._auto and old.q.n_components < new.q.n_components
            # One asked for need not gain; noise, which is huge where tails are heavy, excuses no loss of its own.
            if (grows and gain > -min(noise, self._worth)) or gain > max(self._worth if self._auto else 0.0, noise):
                return replace(state, stage="grow", accepted=new, n_failed=0, tried=())
            # It may gain on its own draws, which may have been too few to tell what holds on others.
            larger = self._steps.larger(inner) if inner.elbo > old.elbo + self._worth else None
            return self._failed(state) if larger is None else replace(state, of_mixture=larger, level=larger.level)
        return self._failed(replace(state, n_collapsed=state.n_collapsed + (inner.failure is Status.COLLAPSED)))

    def _failed(self, state: MixtureFit) -> MixtureFit:
        return replace(state, stage="grow", n_failed=state.n_failed + 1)

    def _accept(self, state: MixtureFit, q: MixtureState) -> Accepted:
        """Measure a mixture on fresh draws; where components are idle, one with fewer of them."""
        level, n_draws = ASSESSMENT + 2 * state.level, _MANY * self._steps.most_draws
        fewer, _, measured = self._steps.at(q, level, n_draws)
        if self._auto:
            fewer = without_idle(fewer, measured, _IDLE * self._worth)
        # Those draws have chosen: others tell what it is worth.
        fewer, _, measured = self._steps.at(fewer, level + 1, n_draws)
        return Accepted(fewer, measured.elbo, measured.elbo_se(), measured.spread(), measured.lost)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _polish(self, state: MixtureFit) -> MixtureFit:
        """Go to fresh draws of the accepted mixture, of which steps are averaged."""
        q, level = cast(Accepted, state.accepted).q, state.level + 1
        # Draws of each component that it was solved on.
        n_pooled = _GAUSSIAN_DRAWS if q.n_components == 1 else FEW_DRAWS
        begun = self._steps.begin(q, level, self._steps.draws_at_end, single=state.gaussian)
        moved = replace(state, stage="average", level=level, n_lost=state.n_dropped)
        if begun is None:
            return replace(moved, status=Status.OUTSIDE_SUPPORT)
        return replace(moved, of_mixture=replace(begun, is_candidate=False, n_pooled=n_pooled))

    def _average(self, state: MixtureFit) -> MixtureFit:
        inner = self._steps.step(cast(MixtureSteps, state.of_mixture))
        return replace(state, of_mixture=inner, level=inner.level)


# --- components in two halves, where one misses the shape of log p ---

#: Distance of the halves from where the whole was, in its own standard deviations: mean and covariance of the two
#: together are those of the whole.
_APART = 0.6


def split(q: MixtureState, evaluation: MixtureEvaluation, rank: int = 0) -> MixtureState | None:
    """Return a mixture with one component in two halves, along the direction in which it errs most."""
    spread = q.weights * np.array(
        [np.var(r[np.isfinite(r)]) if np.isfinite(r).any() else 0.0 for r in evaluation.ratios]
    )
    if rank >= q.n_components or not spread.any():
        return None
    c = int(np.argsort(-spread)[rank])
    whole, ratios = q.components[c], evaluation.ratios[c]
    # The coordinates whose whitened curvature a state stores whole: in these a direction may be any.
    together = np.arange(q.n_dim if whole.factor.ndim > 1 else 0)
    keep = np.isfinite(ratios)
    z, error = evaluation.base.z[keep], (ratios[keep] - ratios[keep].mean()) ** 2
    weighted = z * (error / max(error.sum(), TINY))[:, None]
    direction = np.zeros(q.n_dim)
    if len(together):
        direction[together] = np.linalg.eigh(weighted[:, together].T @ z[:, together])[1][:, -1]
    else:
        direction[np.argmax(np.sum(weighted * z, axis=0))] = 1.0
    matrix = (1.0 / (1.0 - _APART**2) - 1.0) * whole.outer_mean(Outer(direction[None], direction[None], 0.0))
    scaled = whole.precision_scaled_by(whole.add_to_diagonal(matrix, 1.0), np.zeros(q.n_dim))
    if scaled is None:
        return None
    step = whole.unwhiten(_APART * direction)
    halves = [replace(scaled[0], location=whole.location + sign * step) for sign in (1.0, -1.0)]
    log_weights = np.append(q.log_weights, q.log_weights[c])
    log_weights[[c, -1]] -= np.log(2.0)
    return MixtureState.of([*q.components[:c], halves[0], *q.components[c + 1 :], halves[1]], log_weights)
