"""What speaks against a fit that seems to have converged: lost draws, and kinks that Hessians do not see."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import BaseDraws, Evaluation, GaussianState, Moments, Target
from pymc_ngvi.estimators import SEEN, Estimator, in_full_metric, price, stein
from pymc_ngvi.steps.schedule import FEW_DRAWS, loses_draws

# --- what speaks against a fit that seems to have converged: lost draws, and kinks that Hessians do not see ---

#: Whitened error of the diagonal curvature that a converged coordinate may have.
MAX_CURVATURE_ERROR = 0.2
#: Standard errors by which the curvature that gradients show must differ from the Hessians' to be no noise, in one
#: dimension; in more, what the largest of so many normals adds.
_N_SE_KINK = 2.5
#: Parts of the draws on which the ELBO is compared with that of the start; the quantile to which lower values of
#: log p - log q are raised.
_N_PARTS, _UPPER = 8, 0.75
#: Nats below which nothing is told apart: sums of lower ones overflow.
_LEAST = -1e200


def has_diverged(
    q: GaussianState, evaluation: Evaluation, units: NDArray[np.intp], first_elbo: float, *, on_batches: bool = False
) -> bool:
    """Tell whether a fit ended far below its start.

    Steps on noise may lose a little, and a minibatch says little of all the data. The ELBO of the result is therefore
    taken on eight parts of the draws, on a minibatch each; the start has to be above the best of them by more than they
    range over: of nine equals, one stands out so far by chance once in many thousands. Draws below the upper quartile
    count as if they were there: that raises the ELBO, and where log p falls exponentially, few draws are all of it.
    """
    if not (np.isfinite(q.mean()).all() and np.isfinite(q.sd()).all()):
        return True
    if not np.isfinite(first_elbo):
        return False
    h = np.where(evaluation.finite, evaluation.logp - q.log_density(evaluation.theta), np.nan)
    h = np.maximum(h, _LEAST)
    for own in units if on_batches else [units.ravel()]:
        if np.isfinite(h[own]).any():
            h[own] = np.maximum(h[own], np.nanquantile(h[own], _UPPER))
    parts = [h[part.ravel()] for part in np.array_split(units, _N_PARTS)]
    elbos = [float(np.mean(part[np.isfinite(part)])) for part in parts if np.isfinite(part).any()]
    if not elbos:
        return True
    return bool(2.0 * max(elbos) - min(elbos) < first_elbo - q.n_dim)


def is_kinked(q: GaussianState, base: BaseDraws, evaluation: Evaluation, moments: Moments) -> bool:
    """Tell whether gradients show a curvature that Hessians miss: that of kinks, where log p has no Hessian.

    By Stein's identity the diagonal of A is 1 - E[w z] with w = C^T grad log p + z, kinks included.
    """
    pairs = base.pairs()
    pairs = pairs[evaluation.finite[pairs].all(axis=1)]
    if len(pairs) < FEW_DRAWS // 2:
        return False
    rows = pairs.ravel()  # gradients of the others may be infinite
    z = base.z[rows]
    products = (q.whiten(evaluation.grad[rows]) + z) * z
    products = products.reshape(*pairs.shape, -1).mean(axis=1)
    missed = np.abs(q.curvature_diagonal(moments.curvature) - 1.0 + products.mean(axis=0))
    se = products.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    n_se = _N_SE_KINK + np.sqrt(2.0 * np.log(max(len(se), 1)))
    return bool(np.any(missed > MAX_CURVATURE_ERROR + n_se * se))


# --- how many nats a state still lacks, measured on fresh draws, and what speaks against believing it ---

#: Draws of a measurement with Hessians, and from gradients alone.
_N_HESSIANS, _N_GRADIENTS = 64, 2_048


class Measured(NamedTuple):
    """What is left to gain."""

    #: Nats, and the standard deviation of their error.
    gap: float
    sd: float
    #: What a fit deserves in spite of a small gap.
    against: Status | None = None
    #: Variance of log p - log q.
    spread: float = 0.0


#: Where the gap is unknown.
UNKNOWN = Measured(np.nan, np.inf)


def measured_gap(target: Target, q: GaussianState, rng: np.random.Generator, *, second_order: bool) -> Measured:
    """Measure the gap of a state on fresh draws.

    With Hessians where the fit has used them, or where they add little to what it has cost. They miss kinks: where
    gradients show another curvature, a fit by gradients is measured by gradients, and one by Hessians is not believed.
    """
    cheap = 2 * _N_HESSIANS * target.n_dim <= target.n_gradients
    if target.has_hessian and (second_order or cheap):
        base = sobol_draws(_N_HESSIANS, target.n_dim, rng)
        measured = measured_at(target, q, base, price.evaluate(target, q, base), price)
        if second_order or measured.against is not Status.NOT_SMOOTH:
            return measured
    base = sobol_draws(_N_GRADIENTS, target.n_dim, rng)
    return measured_at(target, q, base, stein.evaluate(target, q, base), stein)


def measured_at(
    target: Target,
    q: GaussianState,
    base: BaseDraws,
    evaluation: Evaluation,
    estimator: Estimator,
    *,
    full_metric: bool = True,
) -> Measured:
    """Measure the gap of a state that has been evaluated."""
    if not evaluation.finite.any():
        return Measured(np.nan, np.inf, Status.OUTSIDE_SUPPORT)
    moments = estimator.moments(target, q, base, evaluation)
    against = Status.OUTSIDE_SUPPORT if loses_draws(evaluation) else None
    if against is None and estimator is price and is_kinked(q, base, evaluation, moments):
        against = Status.NOT_SMOOTH
    keep, full = evaluation.finite, None
    if full_metric and not q.exact_metric:
        full = in_full_metric(target, q, evaluation.theta[keep], moments)
    hidden = 1.0 if q.exact_metric or full is not None else SEEN
    moments = full or moments
    spread = float(np.var(evaluation.logp[keep] - q.log_density(evaluation.theta[keep])))
    return Measured(max(moments.gap - moments.floor, 0.0) / hidden, moments.floor_sd / hidden, against, spread)
