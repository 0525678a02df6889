"""Base draws: standard normals; antithetic and quasi-random where the dimension allows, antithetic alone, or plain."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scipy.special import ndtri

from pymc_ngvi.core.sizes import CACHED, STREAMED
from pymc_ngvi.core.types import Array, BaseDraws, VariationalState

#: Beyond this many dimensions the rest of the coordinates are stratified one by one (SciPy's Sobol ends at 21,201).
MAX_SOBOL_DIM = 5_000
#: Independent randomisations in one set of draws: their scatter is the Monte Carlo error of a mean.
N_REPLICATES = 8
#: Least uniform number whose quantile is taken, and as far from 1 the largest: a point of Sobol may be 0.
END = 1e-12


def base_of(state: VariationalState, n: int, rng: np.random.Generator) -> Array:
    """Return what ``n`` independent draws of a state are made of: standard normals and, behind them, its uniforms."""
    base = rng.standard_normal((n, state.n_dim))
    if state.n_uniform:
        base = np.concatenate([base, rng.random((n, state.n_uniform))], axis=1)
    return base


def draws_of(state: VariationalState, n: int, rng: np.random.Generator) -> Array:
    """Return ``n`` independent draws of a state, made in batches where all at once would leave the cache."""
    size = max(CACHED // max(state.n_dim, 1), 1)
    if n * state.n_dim <= STREAMED or state.n_uniform:  # uniforms come after all of the normals
        return np.asarray(state.draws(base_of(state, n, rng)))
    theta = np.empty((n, state.n_dim))
    for start in range(0, n, size):
        theta[start : start + size] = state.draws(base_of(state, min(size, n - start), rng))
    return theta


def chunks(n_draws: int, n_dim: int) -> Iterator[int]:
    """Yield the sizes of chunks of draws that fit in memory."""
    size = max(1, STREAMED // max(n_dim, 1))
    for start in range(0, n_draws, size):
        yield min(size, n_draws - start)


def sobol_draws(n_draws: int, n_dim: int, rng: np.random.Generator) -> BaseDraws:
    """Return quasi-random base draws in independently randomised replicates, each made of pairs z, -z.

    One scrambled Sobol set serves all replicates, each shifted by a vector of its own: scrambling anew took a tenth of
    a whole fit.
    """
    n_replicates = _n_replicates(n_draws // 2)
    half = n_draws // n_replicates // 2
    n_quasi = min(n_dim, MAX_SOBOL_DIM)
    points = np.zeros((half, n_quasi))  # a single point is any, since it is shifted anyway
    if half > 1 and n_quasi:
        points = sobol_points(half, n_quasi, rng)
    blocks = []
    for _ in range(n_replicates):
        z = np.empty((half, n_dim))
        z[:, :n_quasi] = normals_at(np.mod(points + rng.random(points.shape[1]), 1.0))
        if n_quasi < n_dim:
            # A Latin hypercube: each coordinate has one point in each stratum. What depends on one group effect and the
            # global parameters gains nearly as much from it as from Sobol points.
            strata = rng.permuted(np.tile(np.arange(half)[:, None], n_dim - n_quasi), axis=0)
            z[:, n_quasi:] = normals_at((strata + rng.random(strata.shape)) / half)
        blocks += [z, -z]
    return BaseDraws(np.concatenate(blocks), n_replicates)


def sobol_points(n_points: int, n_dim: int, rng: np.random.Generator) -> Array:
    """Return the first points of a scrambled Sobol sequence."""
    from scipy.stats import qmc  # 0.2 s to import

    return np.asarray(qmc.Sobol(n_dim, rng=rng).random_base2((n_points - 1).bit_length())[:n_points])


def antithetic_draws(n_draws: int, n_dim: int, rng: np.random.Generator) -> BaseDraws:
    """Return plain standard normals and their negatives: pairs z, -z in up to eight replicates."""
    n_replicates = _n_replicates(n_draws // 2)
    z = rng.standard_normal((n_replicates, n_draws // n_replicates // 2, n_dim))
    return BaseDraws(np.concatenate([z, -z], axis=1).reshape(n_draws, n_dim), n_replicates)


def plain_draws(n_draws: int, n_dim: int, rng: np.random.Generator) -> BaseDraws:
    """Return independent standard normals in up to eight replicates."""
    return BaseDraws(rng.standard_normal((n_draws, n_dim)), _n_replicates(n_draws), antithetic=False)


#: Kinds of base draws by name.
BASE_DRAWS: dict[str, Callable[[int, int, np.random.Generator], BaseDraws]] = {
    "sobol": sobol_draws,
    "antithetic": antithetic_draws,
    "plain": plain_draws,
}


def _n_replicates(n_units: int) -> int:
    """Return how many replicates of equal size units make: the most that divides them, up to eight."""
    return max(r for r in range(1, N_REPLICATES + 1) if n_units % r == 0)


def normals_at(uniforms: Array) -> Array:
    """Return quantiles of standard normals: those at 0 and 1 are kept at 7.0."""
    return np.asarray(ndtri(np.clip(uniforms, END, 1.0 - END)))


def density_of_normal(z: Any) -> Any:
    """Return the density of a standard normal."""
    return np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
