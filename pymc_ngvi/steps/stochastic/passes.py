"""How many nats a state lacks on all of the data, where log p reads minibatches.

Each replicate of the draws is evaluated on a pass through the data of its own, in a random order. What noise a pass
has, as where its last batch begins another one, then is in the scatter of replicates, like that of the draws.
"""

import numpy as np

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Array, BaseDraws, Evaluation, GaussianState, Target
from pymc_ngvi.estimators import stein
from pymc_ngvi.estimators.metric import SEEN
from pymc_ngvi.steps.adaptive.certificate import loses_draws
from pymc_ngvi.steps.adaptive.measure import UNKNOWN, Measured

#: Part of the gradients of a fit that a measurement may take.
_PART = 0.25
#: Draws, at least and at most.
_FEWEST, _MOST = 64, 2_048


def measured_on_passes(target: Target, q: GaussianState, rng: np.random.Generator) -> Measured:
    """Measure the gap of a state from gradients on all of the data.

    Parameters
    ----------
    target : Target
        Reads minibatches.
    q : GaussianState
    rng : numpy.random.Generator

    Returns
    -------
    Measured
        `UNKNOWN` where a fit has taken so few gradients that measuring would take longer.
    """
    affordable = _PART * target.n_gradients / target.n_batches
    if affordable < _FEWEST:
        return UNKNOWN
    n_draws = min(2 ** int(np.log2(affordable)), _MOST)
    base = sobol_draws(n_draws, target.n_dim, rng)
    evaluation = _on_passes(target, q, base, rng)
    if not evaluation.finite.any():
        return Measured(np.nan, np.inf, Status.OUTSIDE_SUPPORT)
    moments = stein.moments(target, q, base, evaluation)
    against = Status.OUTSIDE_SUPPORT if loses_draws(evaluation) else None
    seen, keep = 1.0 if q.exact_metric else SEEN, evaluation.finite
    spread = float(np.var(evaluation.logp[keep] - q.log_density(evaluation.theta[keep])))
    return Measured(max(moments.gap - moments.floor, 0.0) / seen, moments.floor_sd / seen, against, spread)


def _on_passes(target: Target, q: GaussianState, base: BaseDraws, rng: np.random.Generator) -> Evaluation:
    """Evaluate log p and its gradient, each replicate on the mean over the batches of one pass."""
    theta = q.draws(base.z)
    logp, grad = np.empty(len(theta)), np.empty_like(theta)
    for rows in base.replicates():
        logp[rows], grad[rows] = _on_pass(target, theta[rows], int(rng.integers(2**31)))
    finite = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    elbo = float(logp[finite].mean()) + q.entropy() if finite.any() else -np.inf
    return Evaluation(theta, logp, grad, finite, elbo)


def _on_pass(target: Target, theta: Array, seed: int) -> tuple[Array, Array]:
    n_batches = target.n_batches
    logp, grad = np.zeros(len(theta)), np.zeros_like(theta)
    for number in range(n_batches):
        target.take_batch(seed, number)
        values, slopes = target.logp_grad(theta)
        logp += values / n_batches
        grad += slopes / n_batches
    return logp, grad
