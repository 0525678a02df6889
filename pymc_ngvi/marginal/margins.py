"""Maps between hyperparameters and standard normals: skewed margins of their own tails, tied by a Gaussian copula.

A margin is a sinh-arcsinh distribution [1]_: u = sinh(tail asinh((g - location) / scale) - skewness) is normal. From
tail = 1, a normal, down to 1/2, an exponential fall, it has the tails of logarithms of scales that may be 0, on either
side, in as many coordinates as there are.

References
----------
.. [1] M. C. Jones and A. Pewsey (2009). Sinh-arcsinh distributions. Biometrika 96(4).
   https://doi.org/10.1093/biomet/asp053
"""

from dataclasses import dataclass, replace

import numpy as np

from pymc_ngvi.core.linalg import TINY, solve_lower
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Where margins are looked for, in standardised coordinates: locations, log scales and skewness; and log tails.
_BOUNDS = (*[(-4.0, 4.0)] * 3, (float(np.log(0.5)), 0.3))
#: Where they shrink to with few draws: the mean of log tails, where log scales begin, too; their sd, and that of
#: skewness.
_TAIL, _OF_TAIL, _OF_SKEWNESS = -0.25, 0.25, 1.0
#: Points of a profile, in standard deviations, and of what is interpolated between them; draws that it counts for.
_HALF = np.array([1.0, 2.0, 3.0, 5.0, 8.0, 12.0])
PROFILE = np.concatenate([-_HALF[::-1], [0.0], _HALF])
_N_FINE, _OF_PROFILE = 193, 1_000.0
#: Lightest tail, as a number; by how much tails are made heavier than they are found, all of them together as much as
#: those of so many coordinates.
_LIGHTEST, _HEAVIER, _FEW = 1.0, 0.95, 4.0
#: Steps to the most likely margins; arguments of hyperbolic functions, and nats that a profile falls, at most.
_STEPS, _FARTHEST = 60, 30.0


@stored("exact.margins")
@dataclass(frozen=True, eq=False)
class Margins:
    """A map between coordinates and standard normals."""

    #: Of the margins; shape (p,).
    location: Array
    scale: Array
    skewness: Array
    tail: Array
    #: Of u; shape (p,).
    mean: Array
    #: Lower Cholesky factor of the covariance of u; shape (p, p).
    factor: Array

    @classmethod
    def of_moments(cls, mean: Array, cov: Array) -> "Margins":
        """Return those of a Gaussian."""
        sd, nothing = np.sqrt(np.diag(cov)), np.zeros(len(mean))
        return cls(mean, sd, nothing, nothing + 1.0, nothing, np.linalg.cholesky(cov / np.outer(sd, sd)))

    @classmethod
    def fitted(cls, g: Array, weights: Array, like: "Margins") -> "Margins":
        """Return the most likely margins of weighted draws, (n, p), and the correlations of what these make of them.

        Both shrink, the more so the fewer draws there are.
        """
        p, size = g.shape[1], 1.0 / float(np.sum(weights**2))
        first = cls._apart_from(g, np.tile(weights[:, None], p), size)
        u = first._apart(g)
        centre = weights @ u
        cov = (weights[:, None] * (u - centre)).T @ (u - centre)
        shrunk = p / (p + size)
        sds = np.sqrt(np.diag(cov))
        cov = (1.0 - shrunk) * cov + shrunk * like.correlations * np.outer(sds, sds)
        return replace(first, mean=centre, factor=np.linalg.cholesky(cov))

    @classmethod
    def of_profiles(cls, mode: Array, cov: Array, values: Array) -> "Margins":
        """Return the margins of a log density by its values along the lines of a profile, (n_profile, p)."""
        from scipy.interpolate import PchipInterpolator  # 0.1 s to import

        sd = np.sqrt(np.diag(cov))
        values = np.maximum(np.where(np.isfinite(values), values - values.max(axis=0), -np.inf), -_FARTHEST)
        fine = np.linspace(PROFILE[0], PROFILE[-1], _N_FINE)
        weights = np.exp(PchipInterpolator(PROFILE, values)(fine))
        first = cls._apart_from(mode + fine[:, None] * sd, weights / weights.sum(axis=0), _OF_PROFILE)
        return replace(first, factor=np.linalg.cholesky(cov / np.outer(sd, sd)))

    @classmethod
    def _apart_from(cls, g: Array, weights: Array, size: float) -> "Margins":
        """Return the most likely margins of draws, (n, p), of which each coordinate has weights of its own."""
        from scipy.optimize import minimize  # 0.1 s to import

        p = g.shape[1]
        mean = (weights * g).sum(axis=0)
        sd = np.maximum(np.sqrt((weights * (g - mean) ** 2).sum(axis=0)), TINY)
        begin = np.tile([0.0, _TAIL, 0.0, _TAIL], (p, 1)).T
        lowest, highest = np.array(_BOUNDS).T[:, :, None]
        found = minimize(
            _lack,
            np.clip(begin, lowest, highest).ravel(),
            ((g - mean) / sd, weights, size),
            jac=True,
            method="L-BFGS-B",
            bounds=[bound for bound in _BOUNDS for _ in range(p)],
            options={"maxiter": _STEPS},
        ).x.reshape(-1, p)
        tail = _HEAVIER ** min(1.0, _FEW / p) * np.minimum(np.exp(found[3]), _LIGHTEST)
        return cls(mean + sd * found[0], sd * np.exp(found[1]), found[2], tail, np.zeros(p), np.eye(p))

    @property
    def correlations(self) -> Array:
        """Of u, (p, p)."""
        cov: Array = self.factor @ self.factor.T
        sd = np.sqrt(np.diag(cov))
        return cov / np.outer(sd, sd)

    def forward(self, g: Array) -> Array:
        """Return the normals of coordinates, (n, p)."""
        return solve_lower(self.factor, np.ascontiguousarray((self._apart(g) - self.mean).T)).T

    def inverse(self, z: Array) -> Array:
        """Return the coordinates of normals, (n, p)."""
        u = self.mean + z @ self.factor.T
        return self.location + self.scale * np.sinh(self._clipped((np.arcsinh(u) + self.skewness) / self.tail))

    def log_slope(self, g: Array) -> Array:
        """Return the log determinants of the derivatives of `forward`, (n,)."""
        h = (g - self.location) / self.scale
        a = self._clipped(self.tail * np.arcsinh(h) - self.skewness)
        each = np.log(np.cosh(a)) - 0.5 * np.log1p(h**2) + np.log(self.tail / self.scale)
        return each.sum(axis=1) - np.log(np.diag(self.factor)).sum()

    def _apart(self, g: Array) -> Array:
        """Return u, (n, p)."""
        a = self.tail * np.arcsinh((g - self.location) / self.scale) - self.skewness
        return np.sinh(self._clipped(a))

    @staticmethod
    def _clipped(a: Array) -> Array:
        return np.clip(a, -_FARTHEST, _FARTHEST)


def profile_lines(mode: Array, cov: Array, at: Array) -> Array:
    """Return points so many sds away along each coordinate, the others following as in a Gaussian, (n, p, p)."""
    return mode + at[:, None, None] * (cov / np.sqrt(np.diag(cov))[:, None])


def _lack(packed: Array, g: Array, weights: Array, size: float) -> tuple[float, Array]:
    """Return minus the mean log density of all margins together, with what they shrink to, and its gradient."""
    location, log_scale, skewness, log_tail = packed.reshape(len(_BOUNDS), -1)
    scale, tail = np.exp(log_scale), np.exp(log_tail)
    h = (g - location) / scale
    arc = np.arcsinh(h)
    a = np.clip(tail * arc - skewness, -_FARTHEST, _FARTHEST)
    u, slope = np.sinh(a), np.cosh(a)
    lack = (weights * (0.5 * u**2 - np.log(slope) + 0.5 * np.log1p(h**2))).sum(axis=0) - log_tail + log_scale
    by_a = u * slope - u / slope
    by_h = by_a * tail / np.sqrt(1.0 + h**2) + h / (1.0 + h**2)
    to_tail = (log_tail - _TAIL) / _OF_TAIL
    lack += (0.5 * (skewness / _OF_SKEWNESS) ** 2 + 0.5 * to_tail**2) / size
    gradient = np.stack([
        -(weights * by_h).sum(axis=0) / scale,
        1.0 - (weights * by_h * h).sum(axis=0),
        -(weights * by_a).sum(axis=0) + skewness / _OF_SKEWNESS**2 / size,
        (weights * by_a * tail * arc).sum(axis=0) - 1.0 + to_tail / _OF_TAIL / size,
    ])  # fmt: skip
    return float(lack.sum()), gradient.ravel()
