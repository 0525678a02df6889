"""Cholesky factors of sparse precisions as a structure: the pattern, its fronts, and how files keep them."""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Ints, Supernodes
from pymc_ngvi.families.matrices.structure import Structure

#: Part of the coordinates that a global parameter touches, at least.
_GLOBAL = 0.1
#: Lists of pairs of coordinates whose places are remembered, and factors.
_N_LISTS, _N_FACTORS = 4, 2
#: Pairs of coordinates that the factor has not, at a time.
_AT_A_TIME = 256
#: Relative difference of two matrices that is rounding.
_SAME = 1e-13


class _Curvature(NamedTuple):
    """A matrix that was whitened."""

    #: By which it was; what it became; and the matrix; shape (n_panels,).
    factor: Array
    whitened: Array
    precision: Array

    def parts(self, curvature: Array, diagonal: Ints) -> tuple[float, float] | None:
        """Return which multiples of the identity, and of this matrix, add up to another one; None where none do."""
        beside = self.whitened.copy()
        beside[diagonal] = 0.0
        size = float(beside @ beside)
        if not (np.isfinite(size) and size > 0.0):
            return None
        of_this = float(beside @ curvature) / size
        rest = curvature - of_this * self.whitened
        of_identity = float(rest[diagonal].mean())
        rest[diagonal] -= of_identity
        scale = abs(of_identity) + abs(of_this) * float(np.abs(self.whitened).max())
        return (of_identity, of_this) if np.abs(rest).max() <= _SAME * scale else None


@stored("structure.filled", content=("rows", "cols", "part", "depth"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class FilledStructure(Structure):
    """Factors of precisions of one pattern, with what elimination fills in.

    A factor is held as panels. A curvature is held by the numbers in which the Fisher metric is that of vectors: it is
    the identity where it equals the precision, but entries beside the diagonal are multiplied by the root of 2. They
    are not closed under products: what is not needed for natural steps is not there.
    """

    fronts: Fronts

    columns = None
    #: What natural steps it goes with, for errors.
    goes_with = "with fill-in goes with natural steps from Hessians"

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        """Return the structure of a pattern, in the best order that is found."""
        return cls(fronts_of(pattern))

    @classmethod
    def from_arrays(cls, rows: Ints, cols: Ints, part: Ints, depth: Ints) -> Self:
        """Return the structure of a pattern and an order."""
        rows, cols, part, depth = (np.asarray(a, dtype=np.int64) for a in (rows, cols, part, depth))
        n_dim = len(part)
        same = len(rows) == len(cols)
        if not same or not (np.diff(rows * n_dim + cols) > 0).all() or not ((rows >= cols) & (cols >= 0)).all():
            raise ValueError("the pattern of the precision is none")
        if not np.array_equal(rows[rows == cols], np.arange(n_dim)):
            raise ValueError("the pattern of the precision is none: it should have the whole diagonal")
        if not np.array_equal(np.unique(part), np.arange(len(depth))) or depth.min(initial=0) < 0:
            raise ValueError("the order of elimination is none")
        return cls(Fronts(Pattern(rows, cols, n_dim), Supernodes(part, depth)))

    @property
    def pattern(self) -> Pattern:
        """Where the precision can differ from 0 before anything is filled in."""
        return self.fronts.pattern

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.fronts.n_dim

    rows = property(lambda self: self.pattern.rows)
    cols = property(lambda self: self.pattern.cols)
    part = property(lambda self: self.fronts.parts.part)
    depth = property(lambda self: self.fronts.parts.depth)

    @functools.cached_property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates that touch a large part of the others, and come last."""
        order = self.fronts.order
        touched = (np.diff(self.pattern.matrix.indptr) - 1)[order]
        is_local = (touched <= max(_GLOBAL * self.n_dim, 4.0 * touched.mean())) | (
            self.part[order] != self.part[order[-1]]
        )
        n_last = int(np.argmax(is_local[::-1])) if is_local.any() else self.n_dim
        return np.sort(order[self.n_dim - n_last :])

    @functools.cached_property
    def of_globals(self) -> NDArray[np.bool_]:
        """Which entries of panels are in a row of a global coordinate."""
        n, first = self.n_dim, self.n_dim - len(self.globals_)
        parts = []
        for stack in self.fronts.stacks:
            row = np.concatenate([stack.own, stack.beside], axis=1)
            parts.append(np.repeat((row >= first) & (row < n), stack.shape[1]))
        return np.concatenate(parts)

    # --- form ---

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return self.fronts.n_entries

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: panels of steps, and fronts."""
        return 8 * (40 * self.fronts.n_panels + 6 * self.fronts.n_fronts + 64 * n_dim)

    def on_diagonal(self, matrix: Array) -> NDArray[np.intp]:
        """Return where panels have the diagonal."""
        return self.fronts.diagonal

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""
        panels = np.zeros(self.fronts.n_panels)
        panels[self.fronts.diagonal] = entries
        panels[self.fronts.filled_diagonal] = 1.0
        return panels

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices."""
        names = ("rows", "cols", "part", "depth")
        return {f"precision_{name}": getattr(self, name) for name in names}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays; raise ValueError as `from_arrays` does."""
        return cls.from_arrays(*(arrays[f"precision_{name}"] for name in ("rows", "cols", "part", "depth")))

    # --- factors and vectors ---

    def factor(self, panels: Array) -> SparseCholesky:
        """Return the factor with these panels; of the last few, what was found of it is remembered."""
        known = next((factor for factor in self._factors if factor.panels is panels), None)
        return self.remember(known or SparseCholesky(self.fronts, panels))

    def remember(self, factor: SparseCholesky) -> SparseCholesky:
        """Return a factor, and remember it as the last one that was used."""
        self._factors[:] = [factor, *(other for other in self._factors if other is not factor)][:_N_FACTORS]
        return factor

    @functools.cached_property
    def _factors(self) -> list[SparseCholesky]:
        return []

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self._by_columns(self.factor(factor).times, vectors, transposed)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self._by_columns(self.factor(factor).solve, vectors, transposed)

    def _by_columns(self, operation: Callable[..., Array], vectors: Array, transposed: bool) -> Array:
        rows = vectors.reshape(-1, self.n_dim)
        return np.ascontiguousarray(operation(rows.T, transposed=transposed).T).reshape(vectors.shape)

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations."""
        return np.sqrt(self.factor(factor).inverse[self.fronts.diagonal])

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,); those that the factor has not take a solution each."""
        at = self.places(rows, cols)
        result: Array = self.factor(factor).inverse[at]
        apart = np.flatnonzero(at < 0)
        for some in np.array_split(apart, -(-len(apart) // _AT_A_TIME) or 1):
            first, of_first = np.unique(rows[some], return_inverse=True)
            unit = np.zeros((self.n_dim, len(first)))
            unit[first, np.arange(len(first))] = 1.0
            cholesky = self.factor(factor)
            columns = cholesky.solve(cholesky.solve(unit), transposed=True)
            result[some] = columns[cols[some], of_first]
        return result

    def squares(self, factor: Array, sign: int, vectors: Array) -> Array:
        """Return v^T S v for the precision S of each vector."""
        half = self.times(factor, vectors, transposed=True)
        return np.sum(half * half, axis=-1)

    # --- curvatures ---

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return minus a mean Hessian, whitened."""
        precision = self.precision(hessian)
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            whitened = self.factor(factor).whitened(precision)
        self._curvature[:] = [_Curvature(factor, whitened, precision)]
        return whitened

    def unwhitened(self, factor: Array, curvature: Array) -> Array:
        """Return the matrix of a whitened one, as panels.

        Of the last curvature, and of sums of it with the identity, it is known already: those are plain natural steps.
        """
        cholesky = self.factor(factor)
        for known in self._curvature:
            parts = known.parts(curvature, self.fronts.diagonal) if known.factor is factor else None
            if parts is not None:
                return parts[0] * cholesky.matrix + parts[1] * known.precision
        return cholesky.unwhitened(curvature)

    @functools.cached_property
    def _curvature(self) -> list["_Curvature"]:
        return []

    def dense(self, curvature: Array) -> Array:
        """Return a symmetric matrix, held as panels, as (n_dim, n_dim)."""
        i, j = np.tril_indices(self.n_dim)
        at = self.fronts.places(i, j)
        matrix = np.zeros((self.n_dim, self.n_dim))
        matrix[i[at >= 0], j[at >= 0]] = curvature[at[at >= 0]]
        return matrix + np.tril(matrix, -1).T

    def panels_of(self, pattern: Pattern, values: Array) -> Array:
        """Return the lower triangle of a symmetric matrix as panels."""
        at = self.places(pattern.rows, pattern.cols)
        if (at < 0).any():
            raise ValueError("The Hessian has an entry that the structure of the precision leaves out.")
        panels = np.zeros(self.fronts.n_panels)
        panels[at] = values
        return panels

    @functools.cached_property
    def _remembered(self) -> list[tuple[NDArray[np.integer], NDArray[np.integer], Ints]]:
        return []

    def places(self, rows: NDArray[np.integer], cols: NDArray[np.integer]) -> Ints:
        """Return where panels have entries, as `Fronts.places`; the last few lists of them are remembered."""
        for known_rows, known_cols, at in self._remembered:
            if known_rows is rows and known_cols is cols:
                return at
        at = self.fronts.places(rows, cols)
        self._remembered.insert(0, (rows, cols, at))
        del self._remembered[_N_LISTS:]
        return at

    def precision(self, hessian: MeanHessian) -> Array:
        """Return minus a mean Hessian as panels."""
        if hessian.pattern is None:
            raise ValueError("The Hessian of this target counts as dense: take another family.")
        return -self.panels_of(hessian.pattern, hessian.values())

    def refuse(self, *args: object, **kwargs: object) -> Never:
        """Raise NotImplementedError: what natural steps do not need is not there."""
        raise NotImplementedError(f"a sparse precision {self.goes_with} only")

    product = left_quotient = right_quotient = gram = merged = cholesky = half = lower_solve = refuse
    outer = lower = mirrored = refuse
