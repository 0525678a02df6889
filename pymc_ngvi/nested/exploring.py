"""Hyperparameters sampled by importance, log m being evaluated at few values and predicted at the others."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.marginal.fitting import Hopeless, Sampled, Sampler
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.sampling import Pool, evenly_picked
from pymc_ngvi.nested.emulator import Emulated, Predicted
from pymc_ngvi.nested.log_marginal import Evaluated, LatentMarginal
from pymc_ngvi.nested.mode import find_mode
from pymc_ngvi.nested.verdict import EVEN

#: Evaluations of log m at most, and for each hyperparameter.
_MOST, _MOST_OF_EACH = 120, 60
#: Effective size of the pool: predictions cost nothing.
_WANTED = 8_000
#: Values at which predictions are checked, and conditional fits kept: at most, and as memory goes; at least.
_N_CHECKED, _MOST_BYTES, _FEWEST = 32, 2**28, 8
#: Draws of most weight that are evaluated where weights are too uneven.
_N_HEAVIEST = 8
#: Differences from predictions, an sd in nats, with which a pool is good enough; pools at most.
_GOOD, _MOST_POOLS = 0.05, 4


@dataclass(frozen=True, eq=False)
class Supported:
    """Values of the hyperparameters, picked evenly by weight.

    Parameters
    ----------
    evaluated : list of Evaluated
    states : list of GaussianState
        The latent variables at each.
    difference : float
        Between log m and what was predicted before they were evaluated, an sd in nats.
    """

    evaluated: list[Evaluated]
    states: list[GaussianState]
    difference: float


@dataclass(frozen=True, eq=False)
class Explored:
    """What is known of the hyperparameters.

    Parameters
    ----------
    sampled : Sampled
    predicted : Predicted
        Their log density.
    supported : Supported
    """

    sampled: Sampled
    predicted: Predicted
    supported: Supported


def explore(marginal: LatentMarginal, start: Array, scale: Array, seed: int) -> Explored:
    """Sample the hyperparameters.

    Parameters
    ----------
    marginal : LatentMarginal
    start, scale : ndarray, shape (p,)
        Where to begin, and standard deviations, roughly.
    seed : int

    Raises
    ------
    Hopeless
    """
    p = len(start)
    marginal.scale = scale
    mode = find_mode(marginal, start, scale)
    if mode is None:
        raise Hopeless("the latent variables can't be fitted where the hyperparameters start")
    marginal.scale = np.sqrt(np.diag(mode.cov))
    emulated = Emulated(marginal, _MOST + _MOST_OF_EACH * p)
    for known in marginal.known:
        emulated.tell(known.g, known.value)
    sampler = Sampler(emulated, mode.at, mode.cov, seed, wanted=_WANTED)
    sampled = sampler.run()
    at = np.random.default_rng(seed).random(_MOST_POOLS)
    for number in range(_MOST_POOLS):
        supported = _supported(marginal, emulated, sampled.pool, float(at[number]))
        is_even = effective_size(sampled.pool.log_ratio) > EVEN * len(sampled.pool.g)
        if (supported.difference < _GOOD and is_even) or number == _MOST_POOLS - 1:
            break
        for row in np.argsort(-sampled.pool.log_ratio)[:_N_HEAVIEST]:  # of which predictions may be too high
            emulated.evaluate(sampled.pool.g[row])
        sampled.pool = sampler.sequences.again(sampled.pool)
    sampled.difference = supported.difference
    predicted = emulated.predicted()
    if predicted is None:
        raise Hopeless("the latent variables can be fitted at few of the hyperparameters")
    return Explored(sampled, predicted, supported)


def _supported(marginal: LatentMarginal, emulated: Emulated, pool: Pool, at: float) -> Supported:
    """Evaluate log m at values picked by weight, compare it with predictions, and then let these know."""
    n = max(_FEWEST, min(_N_CHECKED, _MOST_BYTES // marginal.fits.state_bytes))
    rows = evenly_picked(pool.weights()[0], n, at)
    found = [(row, result) for row in rows if (result := marginal.at(pool.g[row])) is not None]
    if 2 * len(found) < n:
        raise Hopeless("the latent variables can't be fitted at most of the hyperparameters")
    apart = [evaluated.value - pool.log_marginal[row] for row, (evaluated, _) in found]
    for _, (evaluated, _) in found:
        emulated.tell(evaluated.g, evaluated.value)
    return Supported([e for _, (e, _) in found], [q for _, (_, q) in found], float(np.std(apart)))
