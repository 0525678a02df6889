"""Draws of effects that one row alone reads, given the predictors of their rows: many at a time.

Given eta, what a row reads, v = eta + a z, has the density exp(f(v) - (v - eta)^2 / (2 a^2)). Rows with the same data
share this family of distributions, whatever the hyperparameters are: its quantiles are smooth functions of eta and of
log a, and stand on a lattice. Interpolated between its points, they make proposals whose density is known, and which
an independence sampler [1]_ corrects: what interpolation is off by, that is exact but for its square.

References
----------
.. [1] L. Tierney (1994). Markov chains for exploring posterior distributions. Annals of Statistics 22(4).
   https://doi.org/10.1214/aos/1176325750
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.quantiles import quantiles
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import Compiled
from pymc_ngvi.rows.integrated import Integrated, densities
from pymc_ngvi.rows.levels import Index
from pymc_ngvi.rows.tabulated import distinct

#: Distance between values of log a, and between quantiles, in standard deviations of a normal; how far these go.
_OF_LOG, _OF_NORMAL, _FARTHEST = 0.2, 0.25, 5.0
#: Values of eta, the numbers that are tried; error of interpolation in it, in standard deviations.
_N_ETA, _ERROR = (17, 33, 65, 129, 257), 0.05
#: Part of their range by which values of eta go farther than they are asked for.
_MARGIN = 0.4
#: Draws for each distribution from which on a lattice pays; numbers in it at most; distributions at a time.
_PAYS, _MOST_NUMBERS, _AT_A_TIME = 100, 2**23, 2**12
#: Steps of the sampler.
_STEPS = 1
_NORMAL = _OF_NORMAL * np.arange(-round(_FARTHEST / _OF_NORMAL), round(_FARTHEST / _OF_NORMAL) + 1.0)


class _Cells(NamedTuple):
    """Where predictors are on the lattice: numbers of the first points, (n_points, n_rows), of two values of log a."""

    first: Index
    second: Index
    part: Array
    part_second: Array


class OwnDraws:
    """Draws effects of one kind of rows with one predictor.

    Parameters
    ----------
    function : callable
        f, concave, of predictor and data.
    """

    def __init__(self, function: Compiled) -> None:
        self._function = function
        self._data: list[Array] = []
        self._lowest, self._step, self._n_eta = 0.0, 0.0, _N_ETA[0]
        self._place: dict[int, int] = {}
        self._quantiles = np.empty((0, 0, 0, len(_NORMAL)))

    @property
    def is_used(self) -> bool:
        """Whether there are quantiles for some draws."""
        return bool(self._place)

    @np.errstate(all="ignore")
    def drawn(self, rng: np.random.Generator, eta: Array, data: list[Array], slope: Array) -> Array:
        """Return one draw of z for each predictor, (n_points, n_rows).

        Parameters
        ----------
        rng : numpy.random.Generator
        eta : ndarray, shape (n_points, n_rows)
        data : list of ndarray
            (1, n_rows) or (1, 1) each.
        slope : ndarray, shape (1, n_rows)
            a.
        """
        first, number = distinct(data, eta.shape[1])
        some = [d if d.shape[1] == 1 else d[:, first] for d in data]
        log_a = np.log(np.abs(slope[0])) / _OF_LOG
        if not self._reaches(some, eta, log_a, len(first)):
            return Integrated(self._function, 1).drawn(rng, eta, *data, slope)
        cells = self._cells(eta, number, log_a)
        current, ratio = np.empty(eta.shape), np.empty(eta.shape)
        for step in range(1 + _STEPS):
            v, log_density = self._proposed(rng, cells)
            z = (v - eta) / slope
            [of_row] = self._function(v, *data)
            proposed = of_row - 0.5 * z * z - log_density
            if not step:
                current, ratio = z, proposed
                continue
            accept = np.log(rng.random(eta.shape)) < proposed - ratio
            current, ratio = np.where(accept, z, current), np.where(accept, proposed, ratio)
        return current

    def _reaches(self, data: list[Array], eta: Array, log_a: Array, n: int) -> bool:
        """See to it that the lattice holds some predictors; tell whether it does, and pays."""
        lowest, highest = float(eta.min()), float(eta.max())
        if not (np.isfinite(lowest) and np.isfinite(highest) and np.isfinite(log_a).all()):
            return False
        below = np.floor(log_a).astype(np.intp)
        needed = np.union1d(below, below + 1)
        if eta.size < _PAYS * n * len(needed):
            return False
        if not _are_alike(self._data, data) or lowest < self._lowest or highest > self._highest:
            margin = _MARGIN * (highest - lowest) + 1e-6
            self._data, self._lowest = data, lowest - margin
            self._step = (highest - lowest + 2.0 * margin) / (self._n_eta - 1)
            self._place = {}
        return self._make(needed, n)

    @property
    def _highest(self) -> float:
        return self._lowest + self._step * (self._n_eta - 1)

    def _make(self, needed: NDArray[np.intp], n: int) -> bool:
        """Find quantiles at some values of log a; tell whether predictors are close enough for these."""
        missing = [k for k in needed.tolist() if k not in self._place]
        while missing:
            if (len(self._place) + len(missing)) * n * self._n_eta * len(_NORMAL) > _MOST_NUMBERS:
                return False
            new = self._of_values(np.array(missing), n)
            middle = new[:, :, 1::2]
            apart = np.abs(middle - 0.5 * (new[:, :, :-1:2] + new[:, :, 2::2])) / _width(middle)[..., None]
            if np.nanmax(apart) < 4.0 * _ERROR:  # a quarter of it is left between points
                kept = self._quantiles[: len(self._place)] if self._place else new[:0]
                self._quantiles = np.concatenate([kept, new])
                self._place |= {k: len(kept) + i for i, k in enumerate(missing)}
                return bool(np.isfinite(new).all())
            if self._n_eta == _N_ETA[-1]:
                return False
            self._step, self._n_eta = 0.5 * self._step, 2 * self._n_eta - 1
            self._place, missing = {}, needed.tolist()
        return True

    def _of_values(self, numbers: NDArray[np.intp], n: int) -> Array:
        """Return quantiles of v at some values of log a, (n_values, n, n_eta, n_quantiles)."""
        eta = (self._lowest + self._step * np.arange(self._n_eta))[:, None]
        result = np.empty((len(numbers), n, self._n_eta, len(_NORMAL)))
        at_once = max(1, _AT_A_TIME // (n * self._n_eta))
        for start in range(0, len(numbers), at_once):
            a = np.exp(_OF_LOG * np.repeat(numbers[start : start + at_once], n))[None]
            m = a.shape[1] // n
            data = [np.tile(d, (1, m)) if d.shape[1] > 1 else d for d in self._data]
            points = np.broadcast_to(eta, (self._n_eta, m * n))
            v = eta[None] + a * _quantiles(*densities(self._function, points, data, a))
            result[start : start + m] = v.transpose(2, 1, 0).reshape(m, n, self._n_eta, -1)
        return result

    def _cells(self, eta: Array, number: Index, log_a: Array) -> _Cells:
        shape = self._quantiles.shape
        at = (eta - self._lowest) / self._step
        left = np.minimum(at.astype(np.intp), self._n_eta - 2)
        below = np.floor(log_a).astype(np.intp)
        lowest = int(below.min())
        places = np.full(int(below.max()) - lowest + 2, -1, dtype=np.intp)
        for k, place in self._place.items():
            if 0 <= k - lowest < len(places):
                places[k - lowest] = place
        first, second = (
            ((places[below - lowest + up] * shape[1] + number) * shape[2] + left) * shape[3] for up in (0, 1)
        )
        return _Cells(first, second, at - left, np.broadcast_to(log_a - below, eta.shape))

    def _proposed(self, rng: np.random.Generator, cells: _Cells) -> tuple[Array, Array]:
        """Return draws of v, and their log densities but for a constant."""
        normal = np.clip(rng.standard_normal(cells.first.shape), _NORMAL[0], _NORMAL[-1])
        at = (normal - _NORMAL[0]) / _OF_NORMAL
        left = np.minimum(at.astype(np.intp), len(_NORMAL) - 2)
        known, ends = self._quantiles.ravel(), []
        for end in (0, 1):
            found = []
            for start in (cells.first, cells.second):
                corner = start + left
                corner += end
                below = known.take(corner)
                corner += len(_NORMAL)
                above = known.take(corner)
                above -= below
                above *= cells.part
                above += below
                found.append(above)
            found[1] -= found[0]
            found[1] *= cells.part_second
            found[1] += found[0]
            ends.append(found[1])
        ends[1] -= ends[0]
        at -= left
        normal *= normal
        normal *= -0.5
        normal -= np.log(ends[1])
        return ends[0] + at * ends[1], normal


def _width(quantiles: Array) -> Array:
    """Return about the standard deviations of distributions with some quantiles, which the last axis has."""
    one = round(1.0 / _OF_NORMAL)
    middle = len(_NORMAL) // 2
    return 0.5 * (quantiles[..., middle + one] - quantiles[..., middle - one])


def _quantiles(z: Array, density: Array, slope: Array, spacing: float) -> Array:
    """Return the quantiles of distributions at those of a normal, (n_quantiles, n_points, n_rows); see `densities`."""
    # Between two nodes: the integral of a cubic through these and the ones beside them.
    per_node = density * slope
    areas = 13.0 * (per_node[1:-2] + per_node[2:-1]) - per_node[:-3] - per_node[3:]
    return quantiles(_NORMAL, z[2:-2], density[2:-2], np.maximum(areas * (spacing / 24.0), 1e-300))


def _are_alike(some: list[Array], others: list[Array]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))
