"""How many nats a state lacks on all of the data, where log p reads minibatches.

Each replicate of the draws is evaluated on a pass through the data of its own, in a random order. What noise a pass
has, as where its last batch begins another one, then is in the scatter of replicates, like that of the draws.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.types import Array, BaseDraws, Evaluation, GaussianState, Target
from pymc_ngvi.estimators import stein
from pymc_ngvi.estimators.draws import evaluation_of
from pymc_ngvi.steps.adaptive.measure import Measured, measured_at

#: Part of the gradients of a fit that a measurement may take.
_PART = 0.25
#: Draws, at least and at most.
_FEWEST, _MOST = 64, 2_048


@dataclass(frozen=True, eq=False)
class OnPasses:
    """A state on all of the data.

    Parameters
    ----------
    measured : Measured
        What is left to gain.
    evaluation : Evaluation
    units : ndarray of int, shape (n_replicates, n_draws / n_replicates)
        Draws on one pass.
    """

    measured: Measured
    evaluation: Evaluation
    units: NDArray[np.intp]


def on_passes(target: Target, q: GaussianState, rng: np.random.Generator) -> OnPasses | None:
    """Evaluate a state, and measure its gap from gradients, on all of the data.

    Parameters
    ----------
    target : Target
        Reads minibatches.
    q : GaussianState
    rng : numpy.random.Generator

    Returns
    -------
    OnPasses or None
        None where the fit has taken so few gradients that this would take longer.
    """
    affordable = _PART * target.n_gradients / target.n_batches
    if affordable < _FEWEST:
        return None
    base = sobol_draws(min(2 ** int(np.log2(affordable)), _MOST), target.n_dim, rng)
    evaluation = _by_replicate(q, base, lambda theta: _on_pass(target, theta, int(rng.integers(2**31))))
    # The Hessian that the target knows is that of one batch.
    measured = measured_at(target, q, base, evaluation, stein, full_metric=False)
    return OnPasses(measured, evaluation, replicates(base))


def on_batches(target: Target, q: GaussianState, base: BaseDraws, rng: np.random.Generator) -> Evaluation:
    """Evaluate each replicate of the draws on a minibatch of its own."""

    def evaluate(theta: Array) -> tuple[Array, Array]:
        target.next_batch(rng)
        return target.logp_grad(theta)

    return _by_replicate(q, base, evaluate)


def replicates(base: BaseDraws) -> NDArray[np.intp]:
    """Return the rows of each replicate, (n_replicates, n_draws / n_replicates)."""
    return np.arange(base.n_draws).reshape(base.n_replicates, -1)


def _by_replicate(q: GaussianState, base: BaseDraws, evaluate: Callable[[Array], tuple[Array, Array]]) -> Evaluation:
    theta = q.draws(base.z)
    parts = [evaluate(theta[rows]) for rows in base.replicates()]
    logp, grad = (np.concatenate(part) for part in zip(*parts, strict=True))
    return evaluation_of(q, theta, logp, grad)


def _on_pass(target: Target, theta: Array, seed: int) -> tuple[Array, Array]:
    n_batches = target.n_batches
    logp, grad = np.zeros(len(theta)), np.zeros_like(theta)
    for number in range(n_batches):
        target.take_batch(seed, number)
        values, slopes = target.logp_grad(theta)
        logp += values / n_batches
        grad += slopes / n_batches
    return logp, grad
