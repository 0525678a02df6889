"""Base draws: standard normals, antithetic, quasi-random where the dimension allows."""

import numpy as np

from scipy.special import ndtri
from scipy.stats import qmc

from pymc_ngvi.types import Array, BaseDraws

#: Beyond this many dimensions the rest of the coordinates are plain normals (SciPy's Sobol ends at 21,201).
MAX_SOBOL_DIM = 5_000
#: Independent randomisations in one set of draws: their scatter is the Monte Carlo error of a mean.
N_REPLICATES = 8


def sobol_normals(n_draws: int, n_dim: int, rng: np.random.Generator) -> Array:
    """Return scrambled Sobol points mapped to standard normals, (n_draws, n_dim); ``n_draws`` a power of 2."""
    n_quasi = min(n_dim, MAX_SOBOL_DIM)
    z = np.empty((n_draws, n_dim))
    if n_quasi:
        uniforms = qmc.Sobol(n_quasi, scramble=True, rng=rng).random(n_draws)
        # Scrambled points can be exactly 0: keep them 1e-10 away, 6.4 standard deviations.
        z[:, :n_quasi] = ndtri(np.clip(uniforms, 1e-10, 1 - 1e-10))
    z[:, n_quasi:] = rng.standard_normal((n_draws, n_dim - n_quasi))
    return z


def antithetic_draws(n_draws: int, n_dim: int, rng: np.random.Generator) -> BaseDraws:
    """Return base draws in independently scrambled replicates, each made of pairs z, -z.

    Parameters
    ----------
    n_draws : int
        A power of 2, at least 2.
    n_dim : int
    rng : numpy.random.Generator
        Advanced.

    Returns
    -------
    BaseDraws
    """
    n_replicates = min(N_REPLICATES, n_draws // 2)
    half = n_draws // n_replicates // 2
    blocks = []
    for _ in range(n_replicates):
        z = sobol_normals(half, n_dim, rng)
        blocks += [z, -z]
    return BaseDraws(np.concatenate(blocks), n_replicates)
