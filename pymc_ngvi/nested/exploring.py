"""Hyperparameters sampled by importance, log m being evaluated at few values and predicted at the others."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Hopeless, Sampled, Sampler
from pymc_ngvi.marginal.sampling import Pool, Sequences, evenly_picked
from pymc_ngvi.nested.emulator import Emulated
from pymc_ngvi.nested.log_marginal import Evaluated, LatentMarginal
from pymc_ngvi.nested.mode import find_mode

#: Evaluations of log m at most, and for each hyperparameter; values at which predictions are checked.
_MOST, _MOST_OF_EACH, N_CHECKED = 120, 60, 32
#: Differences from predictions, an sd in nats, with which a pool is good enough; pools at most.
_GOOD, _MOST_POOLS = 0.05, 4


@dataclass(frozen=True, eq=False)
class Explored:
    """What is known of the hyperparameters.

    Parameters
    ----------
    sampled : Sampled
    sequences : Sequences
    supports : list of Evaluated
        Of equal weight.
    difference : float
        Between log m and its predictions at these, which these were made without, an sd in nats.
    n_fits : int
        Conditional fits.
    """

    sampled: Sampled
    sequences: Sequences
    supports: list[Evaluated]
    difference: float
    n_fits: int


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
    sampler = Sampler(emulated, mode.at, mode.cov, seed)
    sampled = sampler.run()
    rng = np.random.default_rng(seed)
    for _ in range(_MOST_POOLS):
        supports, difference = _checked(marginal, emulated, sampled.pool, float(rng.random()))
        if difference < _GOOD:
            break
        sampled.pool = sampler.sequences.again(sampled.pool)
    sampled.difference = difference
    return Explored(sampled, sampler.sequences, supports, difference, marginal.fits.n_fits)


def _checked(
    marginal: LatentMarginal, emulated: Emulated, pool: Pool, at: float
) -> tuple[list[Evaluated], float]:
    """Evaluate log m at values picked by weight, compare it with predictions, and then let these know."""
    weights = pool.weights()[0]
    rows = evenly_picked(weights, N_CHECKED, at)
    found = [marginal.at(g) for g in pool.g[rows]]
    supports = [one for one in found if one is not None]
    if len(supports) < N_CHECKED // 2:
        raise Hopeless("the latent variables can't be fitted at most of the hyperparameters")
    values = np.array([one.value for one in supports])
    predicted = np.array([p for p, one in zip(pool.log_marginal[rows], found, strict=True) if one is not None])
    for one in supports:
        emulated.tell(one.g, one.value)
    return supports, float(np.std(values - predicted))
