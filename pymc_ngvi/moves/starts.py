"""Where superchains begin: far out from the fits, where log p is finite."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, HasGradient

#: Standard deviations of starts, from and to, in those of a fit; part that is left of these for each further try, and
#: tries.
_SPREAD, _NEARER, _TRIES = (2.0, 3.0), 0.85, 24


class StartRegion(Protocol):
    """A Gaussian, or coordinates that whiten one."""

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""

    def draws(self, base: Array) -> Array:
        """Return the points of standard normals, (n_points, n_dim)."""


def starts_of(
    target: HasGradient,
    fits: Sequence[StartRegion],
    n: int,
    rng: np.random.Generator,
    inside: Callable[[Array], NDArray[np.bool_]] | None = None,
) -> Array | None:
    """Return points far out from fits, which take turns, (n, n_dim); None where log p is finite at too few.

    Parameters
    ----------
    target : HasGradient
    fits : sequence of StartRegion
        That of the largest mass first.
    n : int
    rng : numpy.random.Generator
    inside : callable, optional
        Tells which points will do.
    """
    x = np.full((n, fits[0].n_dim), np.nan)
    missing, spread = np.arange(n), np.linspace(*_SPREAD, n)
    for _ in range(_TRIES):
        z = spread[missing, None] * rng.standard_normal((len(missing), x.shape[1]))
        drawn = np.array([fits[i % len(fits)].draws(z[None, at])[0] for at, i in enumerate(missing.tolist())])
        usable = np.isfinite(drawn).all(axis=1)
        drawn[~usable] = fits[0].mean()
        logp, grad = target.logp_grad(drawn)
        usable &= np.isfinite(logp) & np.isfinite(grad).all(axis=1)
        if inside is not None:
            usable[usable] = inside(drawn[usable])
        x[missing[usable]] = drawn[usable]
        missing, spread = missing[~usable], spread * _NEARER
        if not len(missing):
            return x
    return None
