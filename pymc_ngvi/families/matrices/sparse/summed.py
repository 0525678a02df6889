"""Precisions that are sparse but for sums over many coordinates, as a structure: pattern, sums, and what files keep."""

import functools

from dataclasses import dataclass
from typing import Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import SummedPattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.order import Ints
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.sums import Summed, SummedCholesky, Sums

#: Pairs of coordinates that the factor has not, at a time; factors that are remembered.
_AT_A_TIME, _N_FACTORS = 256, 2
#: Numbers of a row and column of a sum for each coordinate, at the peak of a fit.
_PER_COORDINATE = 60
#: Relative difference of two vectors that is rounding.
_SAME = 1e-12


@stored("structure.summed", content=("rows", "cols", "part", "depth", "weights", "pins"), make="from_parts")
@dataclass(frozen=True, eq=False)
class SummedStructure(FilledStructure):
    """Factors of precisions that are sparse but for sums.

    A factor is held as the panels of the sparse part, pins added; the slopes; and the strength of the pins. A curvature
    is held as the numbers of `SummedCholesky.whitened`.
    """

    sums: Sums

    goes_with = "with sums goes with natural steps by exact expectations"

    @classmethod
    def of_sums(cls, summed: SummedPattern) -> Self:
        """Return the structure of a pattern with sums, in the best order that is found."""
        inner = FilledStructure.of(summed.among)
        place = inner.fronts.place
        return cls(inner.fronts, Sums.of(summed.weights, inner.globals_[np.argsort(place[inner.globals_])]))

    @classmethod
    def from_parts(cls, rows: Ints, cols: Ints, part: Ints, depth: Ints, weights: Array, pins: Ints) -> Self:
        """Return the structure of a pattern, an order and sums; raise ValueError where they make none."""
        fronts = FilledStructure.from_arrays(rows, cols, part, depth).fronts
        weights, pins = np.asarray(weights, dtype=np.float64), np.asarray(pins, dtype=np.int64)
        if weights.ndim != 2 or weights.shape[1] != len(part) or not ((pins >= 0) & (pins < len(part))).all():
            raise ValueError("the sums of the precision are none")
        return cls(fronts, Sums(weights, pins))

    weights = property(lambda self: self.sums.weights)
    pins = property(lambda self: self.sums.pins)

    @property
    def n_sums(self) -> int:
        """Number of sums."""
        return len(self.sums.weights)

    # --- form ---

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return super().n_lower(n_dim) + self.n_sums * n_dim + len(self.pins)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return super().memory_bytes(n_dim) + 8 * _PER_COORDINATE * (self.n_sums + len(self.pins)) * n_dim

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal factor."""
        return np.concatenate([super().from_diagonal(entries), np.zeros(self.n_sums * self.n_dim + len(self.pins))])

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices."""
        return {**super().arrays(), "sum_weights": self.weights, "sum_pins": self.pins}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays; raise ValueError as `from_parts` does."""
        names = ("precision_rows", "precision_cols", "precision_part", "precision_depth", "sum_weights", "sum_pins")
        return cls.from_parts(*(arrays[name] for name in names))

    # --- factors ---

    def summed(self, factor: Array) -> SummedCholesky:
        """Return the factor of these numbers; of the last few, what was found of it is remembered."""
        for numbers, known in self._summed:
            if numbers is factor:
                return known
        n = self.fronts.n_panels
        first, second = n, n + self.n_sums * self.n_dim
        pinned = SparseCholesky(self.fronts, factor[:first])
        slopes = factor[first:second].reshape(self.n_dim, self.n_sums)
        return self._remembering(factor, SummedCholesky(pinned, slopes, factor[second:], self.sums))

    def numbers(self, factor: SummedCholesky) -> Array:
        """Return the numbers of a factor: the inverse of `summed`."""
        numbers = np.concatenate([factor.pinned.panels, factor.slopes.ravel(), factor.strength])
        self._remembering(numbers, factor)
        return numbers

    def _remembering(self, numbers: Array, factor: SummedCholesky) -> SummedCholesky:
        self._summed[:] = [(numbers, factor), *self._summed][:_N_FACTORS]
        return factor

    @functools.cached_property
    def _summed(self) -> list[tuple[Array, SummedCholesky]]:
        return []

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self._by_columns(self.summed(factor).times, vectors, transposed)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self._by_columns(self.summed(factor).solve, vectors, transposed)

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations."""
        every = np.arange(self.n_dim)
        return np.sqrt(self.summed(factor).inverse(every, every, self.fronts.diagonal))

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,); those that the sparse part has not take a solution each."""
        at, cholesky = self.places(rows, cols), self.summed(factor)
        result = cholesky.inverse(rows, cols, at)
        apart = np.flatnonzero(at < 0)
        for some in np.array_split(apart, -(-len(apart) // _AT_A_TIME) or 1):
            first, of_first = np.unique(rows[some], return_inverse=True)
            unit = np.zeros((self.n_dim, len(first)))
            unit[first, np.arange(len(first))] = 1.0
            result[some] = cholesky.solve(cholesky.solve(unit), transposed=True)[cols[some], of_first]
        return result

    # --- curvatures ---

    def summed_precision(self, hessian: MeanHessian) -> Summed:
        """Return minus a mean Hessian."""
        found = hessian.summed
        if found is None or not np.array_equal(found.weights, self.weights):
            raise ValueError("The Hessian of this target has other sums than the structure of the precision.")
        values, n = -hessian.summed_values(), self.n_dim
        rows, cols = found.pattern.rows, found.pattern.cols
        inner, of_sums = rows < n, cols >= n
        between = ~inner & ~of_sums
        slopes = np.zeros((n, self.n_sums))
        slopes[cols[between], rows[between] - n] = values[between]
        among = np.zeros((self.n_sums, self.n_sums))
        i, j = rows[of_sums] - n, cols[of_sums] - n
        among[i, j] = among[j, i] = values[of_sums]
        return Summed(self.panels_of(found.among, values[inner]), slopes + 0.5 * self.weights.T @ among)

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return minus a mean Hessian, whitened."""
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            precision = self.summed_precision(hessian)
            whitened = self.summed(factor).whitened(precision)
        self._last[:] = [(factor, whitened, precision)]
        return whitened

    def unwhitened_sum(self, factor: Array, curvature: Array) -> Summed:
        """Return the matrix of a whitened one.

        Of the last curvature, and of sums of it with the identity, it is known already: those are plain natural steps.
        """
        cholesky = self.summed(factor)
        for of_factor, whitened, precision in self._last:
            parts = _parts(curvature, cholesky.unit, whitened) if of_factor is factor else None
            if parts is not None:
                both = zip(cholesky.matrix, precision, strict=True)
                return Summed(*(parts[0] * own + parts[1] * other for own, other in both))
        return cholesky.unwhitened(curvature)

    @functools.cached_property
    def _last(self) -> list[tuple[Array, Array, Summed]]:
        return []

    on_diagonal = dense = precision = unwhitened = factor = remember = FilledStructure.refuse


def _parts(vector: Array, unit: Array, other: Array) -> tuple[float, float] | None:
    """Return which multiples of two vectors add up to a third; None where none do."""
    if not np.isfinite(other).all():
        return None
    square = float(unit @ unit)
    beside = other - float(unit @ other) / square * unit
    size = float(beside @ beside)
    of_other = float(beside @ vector) / size if size > 0.0 else 0.0
    of_unit = float(unit @ (vector - of_other * other)) / square
    rest = np.abs(vector - of_unit * unit - of_other * other)
    most = _SAME * (abs(of_unit) + abs(of_other)) * (np.abs(unit) + np.abs(other))
    return (of_unit, of_other) if (rest <= most).all() else None
