"""Draws of latent variables from farther out, in the directions in which their density falls more slowly than q's.

Weights p / q are bounded where q has the heavier tails. Given the hyperparameters, q is a Gaussian: beyond some three
standard deviations of the linear predictor of a row, p may be many times larger, and what is computed of it, a rate or
a variance, with it. So a part of the draws has such a predictor moved out, all else following by its correlations with
it. Weights are those of the mixture of both kinds of draws [1]_, which costs little where q is right.

References
----------
.. [1] T. Hesterberg (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
   37(2). https://doi.org/10.1080/00401706.1995.10484303
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.nested.many import ManyGaussians

#: One of so many draws is from farther out.
_OF_DRAWS = 8
#: Mean and standard deviation of a predictor that is moved out, in standard deviations; where p and q are compared.
_OUT, _WIDTH, _LOOK = 3.0, 1.5, 4.0
#: Directions at most.
_MOST = 128


def n_far_of(n_draws: int) -> int:
    """Return how many of some draws are from farther out."""
    return n_draws // _OF_DRAWS


@dataclass(frozen=True, eq=False)
class Defence:
    """Directions in which draws are moved out, the same for all hyperparameters."""

    #: Of rows: a direction is that in which one of them changes most; shape (n,).
    predictors: NDArray[np.intp]
    #: Whether it is moved up or down; shape (n,).
    signs: Array
    #: By which one of them is picked; they add up to 1; shape (n,).
    probabilities: Array

    @classmethod
    def of(cls, given: RowsGiven, at: ManyGaussians) -> "Defence":
        """Return the directions in which log p - log q grows at one fit, by how much it does."""
        if given.is_quadratic:
            return cls(np.empty(0, dtype=np.intp), np.empty(0), np.empty(0))
        used = np.unique(np.concatenate([kind.index.ravel() for kind in at.rows.functions]))
        n = max(1, min(len(used), STREAMED // max(given.n_rows, given.n_dim, 1)))
        used = used[(np.arange(n) * len(used)) // n]
        far = _LOOK * _directions(at, used)
        base = np.concatenate([far, -far, np.zeros((1, given.n_dim, 1))], axis=2)
        with np.errstate(all="ignore"):
            [log_ratio] = at.rows.values(at.draws(base)) - at.log_density(base)
        grows = np.nan_to_num(log_ratio[:-1] - log_ratio[-1], nan=0.0, posinf=0.0, neginf=0.0)
        most = np.argsort(-grows, kind="stable")[:_MOST]
        most = most[grows[most] > 1.0]  # of others, weights are bounded as it is, as far as there are draws
        total = grows[most].sum()
        return cls(used[most % n], np.where(most < n, 1.0, -1.0), grows[most] / total if len(most) else np.empty(0))

    def picked(self, n: int, n_draws: int, rng: np.random.Generator) -> NDArray[np.intp]:
        """Return in which directions draws are moved out at ``n`` values, (n, n_far)."""
        if not len(self.predictors):
            return np.empty((n, 0), dtype=np.intp)
        return rng.choice(len(self.predictors), (n, n_far_of(n_draws)), p=self.probabilities)

    def moved(self, fits: ManyGaussians, base: Array, picked: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return standard normals, (n, n_dim, n_draws), of which the last are moved out, and log q' - log q there.

        q' is the mixture of both kinds of draws; shape (n, n_draws).
        """
        n_far, n_draws = picked.shape[1], base.shape[2]
        if not n_far:
            return base, np.zeros((len(base), n_draws))
        directions = np.swapaxes(_directions(fits, self.predictors), 1, 2)
        along = np.take_along_axis(directions, picked[:, :, None], axis=1)  # (n, n_far, n_dim)
        moved, last = base.copy(), np.swapaxes(base[:, :, -n_far:], 1, 2)
        before = np.einsum("nfd,nfd->nf", last, along)
        after = self.signs[picked] * (_OUT + _WIDTH * before)
        moved[:, :, -n_far:] += np.swapaxes((after - before)[:, :, None] * along, 1, 2)
        part = n_far / n_draws
        # The density of draws that are moved out, as a multiple of the normal density.
        predictors = np.swapaxes(np.matmul(directions, moved), 1, 2)
        squares = predictors**2 - ((self.signs * predictors - _OUT) / _WIDTH) ** 2
        ratio = (np.exp(0.5 * squares) / _WIDTH) @ self.probabilities
        return moved, np.log1p(part * (ratio - 1.0))


def _directions(fits: ManyGaussians, predictors: NDArray[np.intp]) -> Array:
    """Return unit vectors of normals along which predictors change most, (n, n_dim, n_predictors); 0 for constants."""
    along = fits.factors.solve(fits.rows.maps.transposed_rows(predictors))
    norm = np.linalg.norm(along, axis=1, keepdims=True)
    return along / np.where(norm > 0.0, norm, np.inf)
