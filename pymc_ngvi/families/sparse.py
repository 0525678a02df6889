r"""Gaussians with a sparse precision: of groups that are independent given global coordinates, chains, maps.

q holds the Cholesky factor T of the precision S, with what elimination fills in: nothing, where blocks are beside a
border of global coordinates that comes last. On matrices of that pattern the Fisher metric, :math:`\mathrm{tr}(V E V
E)` with V the covariance, is a sum of squares of as many numbers as T has [1]_. Those of minus the Hessian are the
whitened curvature: it is the identity where that is S.

References
----------
.. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
   Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353
"""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Never, Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core import linalg, prices
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, Indices, MeanHessian
from pymc_ngvi.families.family import NO_GAUSS_NEWTON, NO_IVON, OF_PRECISION, Refusal, Traits
from pymc_ngvi.families.fronts import Fronts, Ints, SparseCholesky, Supernodes
from pymc_ngvi.families.gaussian import PER_COORDINATE, Gaussian, GaussianFamily, Partition, Structure

# --- cholesky factors of sparse precisions as a structure: the pattern, its fronts, and how files keep them ---


#: Lists of pairs of coordinates whose places are remembered, and factors.
_N_LISTS, _N_FACTORS = 4, 2
#: Pairs of coordinates that the factor has not, at a time.
_AT_A_TIME = 256
#: Pivots this many times the least one are taken for as large as any variance would tell.
_CLEAR = 1e6
_ROOT_2 = np.sqrt(2.0)
#: Bytes of a fit at its peak, for each entry of panels and of fronts.
_PER_PANEL, _PER_FRONT = 320, 48


class _Row(NamedTuple):
    """Fronts with the same beside them, one after the other."""

    #: Of their panels: the entries, and their shape as columns of each front, (n, k, k + m).
    entries: slice
    shape: tuple[int, int, int]
    #: Coordinates of their own, (n * k,), and beside, (m,).
    own: Ints
    beside: Ints
    #: Where panels have the lower triangle that these are in, (m, m).
    among: Ints

    def of(self, panels: Array) -> tuple[Array, Array, Array]:
        """Return its columns, those of them that are beside, (n * k, m), as views, and the triangle beside, dense."""
        columns = panels[self.entries].reshape(self.shape)
        return columns, columns[:, :, self.shape[1] :], np.tril(panels[self.among])


#: What files keep of a pattern and an order.
_KEPT = ("rows", "cols", "part", "depth")


@stored("structure.sparse", content=_KEPT, make="from_arrays")
@dataclass(frozen=True, eq=False)
class SparseStructure(Fronts, Structure):
    """Factors of precisions of one pattern, with what elimination fills in.

    A factor is held as panels. A curvature is held by the numbers in which the Fisher metric is that of vectors: it is
    the identity where it equals the precision, but entries beside the diagonal are multiplied by the root of 2.

    Where all that comes after a front up to the root is beside it, as with blocks of coordinates beside a border that
    all of them touch, factors are closed under products and inverses, and a curvature has the entries of :math:`-T^{-1}
    H T^{-T}`. What natural steps do not need is there for such factors only. The Gaussian of given covariances in the
    entries of these, of largest entropy, has a closed form [1]_: that of what is beside, and regressions on it.

    References
    ----------
    .. [1] S. L. Lauritzen (1996). Graphical Models. Oxford University Press, section 5.3.
    """

    #: Factors that were used last; lists of coordinates, and where panels have these entries.
    _factors: list[tuple[Array, Any]] = field(default_factory=list, init=False, repr=False)
    _places: list[tuple[NDArray[np.integer], NDArray[np.integer], Ints]] = field(
        default_factory=list, init=False, repr=False
    )

    #: What natural steps it goes with, for errors.
    goes_with = "with fill-in goes with natural steps from Hessians"

    @classmethod
    def of_blocks(cls, blocks: Partition) -> Self:
        """Return the structure of blocks beside a border that all of them touch, which comes last."""
        labels, part = np.unique(blocks.labels, return_inverse=True)
        return cls(blocks.pattern, Supernodes(part.astype(np.int64), (labels >= 0).astype(np.int64)))

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
        return cls(Pattern(rows, cols, n_dim), Supernodes(part, depth))

    rows = property(lambda self: self.pattern.rows)
    cols = property(lambda self: self.pattern.cols)
    part = property(lambda self: self.parts.part)
    depth = property(lambda self: self.parts.depth)

    # --- form ---

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return self.n_entries

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: panels of steps, and fronts."""
        return _PER_PANEL * self.n_panels + _PER_FRONT * self.n_fronts + PER_COORDINATE * n_dim

    def shape(self, n_dim: int) -> tuple[int, ...]:
        """Return the shape of the array."""
        return (self.n_panels,)

    def on_diagonal(self, n_dim: int) -> Indices:
        """Return where panels have the diagonal."""
        return self.diagonal

    # --- factors and vectors ---

    def cholesky_of(self, numbers: Array) -> Any:
        """Return the factor of these numbers; of the last few, what is known of it is remembered."""
        known = next((factor for of_factor, factor in self._factors if of_factor is numbers), None)
        return self.remember(numbers, known or self._cholesky(numbers))

    def remember(self, numbers: Array, factor: Any) -> Any:
        """Return a factor, and remember it as the last one that was used."""
        others = (pair for pair in self._factors if pair[0] is not numbers)
        self._factors[:] = [(numbers, factor), *others][:_N_FACTORS]
        return factor

    def _cholesky(self, numbers: Array) -> Any:
        return SparseCholesky(self, numbers)

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self._by_columns(self.cholesky_of(factor).times, vectors, transposed)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self._by_columns(self.cholesky_of(factor).solve, vectors, transposed)

    def _by_columns(self, operation: Callable[..., Array], vectors: Array, transposed: bool) -> Array:
        rows = vectors.reshape(-1, self.n_dim)
        return np.ascontiguousarray(operation(rows.T, transposed=transposed).T).reshape(vectors.shape)

    # --- curvatures ---

    def scaled(self, factor: Array, curvature: Array) -> Array | None:
        """Return the factor of the matrix of a whitened one; None where that is not positive definite."""
        terms = self.cholesky_of(factor).matrix[self.diagonal]
        new = SparseCholesky.of(self, self.cholesky_of(factor).unwhitened(curvature), terms)
        return None if new is None else self.remember(new.panels, new).panels

    def _lower_of(self, curvature: Array) -> Array:
        """Return the lower triangle of a curvature."""
        lower, at = curvature / _ROOT_2, self.diagonal
        lower[at] = curvature[at]
        return lower

    def panels_of(self, pattern: Pattern, values: Array) -> Array:
        """Return the lower triangle of a symmetric matrix as panels."""
        at = self.places(pattern.rows, pattern.cols)
        if (at < 0).any():
            raise ValueError("The Hessian has an entry that the structure of the precision leaves out.")
        panels = np.zeros(self.n_panels)
        panels[at] = values
        return panels

    def places(self, rows: NDArray[np.integer], cols: NDArray[np.integer]) -> Ints:
        """Return where panels have entries, as `Fronts.places`; the last few lists of them are remembered."""
        for known_rows, known_cols, at in self._places:
            if known_rows is rows and known_cols is cols:
                return at
        at = super().places(rows, cols)
        self._places[:] = [(rows, cols, at), *self._places][:_N_LISTS]
        return at

    def precision(self, hessian: MeanHessian) -> Any:
        """Return minus a mean Hessian as panels."""
        if hessian.pattern is None:
            raise ValueError("The Hessian of this target counts as dense: take another family.")
        return -self.panels_of(hessian.pattern, hessian.values())

    # --- products, where factors are closed under these; an outer product is the lower triangle of one ---

    @functools.cached_property
    def _rows_of_fronts(self) -> list[_Row]:
        """The fronts, those first that are eliminated last."""
        if not self.is_closed:
            self.refuse()
        result = []
        for k, m, n, panel, start, first in self.layout.table[::-1, :6].tolist():
            order, beside = self.order, self.symbolic.beside[first : first + m]
            last = order[beside]
            among = self.places(np.repeat(last, m), np.tile(last, m)).reshape(m, m)
            entries = slice(panel, panel + n * k * (k + m))
            result.append(_Row(entries, (n, k, k + m), order[start : start + n * k], last, among))
        return result

    def product(self, left: Array, right: Array) -> Array:
        """Return the product of two factors."""
        result = np.empty_like(left)
        for row in self._rows_of_fronts:
            (a, _, beside), (x, below, _), (n, k, _) = row.of(left), row.of(right), row.shape
            columns = x[:, :, :k] * a if k == 1 else x[:, :, :k] @ a
            columns[:, :, k:] += (below.reshape(n * k, -1) @ beside.T).reshape(n, k, -1)
            result[row.entries] = columns.ravel()
        return result

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the factor L with A = L L^T; None where A is not positive definite, in any direction."""
        at, terms = self.diagonal, linalg.relative_terms(curvature[self.diagonal])
        factor = SparseCholesky.of(self, self._lower_of(curvature), terms)
        if factor is None:
            return None
        is_clear = (factor.panels[at] ** 2 > _CLEAR * linalg.ROUNDING * terms).all()
        if is_clear or (factor.inverse[at] * terms).max() < 1.0 / linalg.ROUNDING:
            return self.remember(factor.panels, factor).panels
        return None

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the entries that a factor has of F^-T A."""
        result, lower = np.empty_like(curvature), self._lower_of(curvature)
        for row in self._rows_of_fronts:
            (t, slopes, beside), (a, below, _), (n, k, _) = row.of(factor), row.of(lower), row.shape
            columns = np.empty(row.shape)
            last = linalg.solve_lower(beside, below.reshape(n * k, -1).T, transpose=True).T if below.size else below
            columns[:, :, k:] = last.reshape(n, k, -1)
            rest = (a[:, :, :k] - columns[:, :, k:] @ slopes.mT).mT
            columns[:, :, :k] = np.triu(linalg.solve_lower(t[:, :, :k].mT, rest, transpose=True).mT)
            result[row.entries] = columns.ravel()
        return result

    def half(self, curvature: Array) -> Array:
        """Return the lower triangle with a halved diagonal."""
        lower = self._lower_of(curvature)
        lower[self.diagonal] *= 0.5
        return lower

    def outer(self, left: Array, right: Array) -> Array:
        """Return the lower triangle of the mean of left_b right_b^T."""
        result, scaled = np.empty(self.n_panels), right / len(right)
        for row in self._rows_of_fronts:
            n, k, _ = row.shape
            of_own = scaled[:, row.own].T.reshape(n, k, -1)
            within = np.triu(of_own @ left[:, row.own].T.reshape(n, k, -1).mT)
            below = (of_own.reshape(n * k, -1) @ left[:, row.beside]).reshape(n, k, -1)
            result[row.entries] = np.concatenate([within, below], axis=2).ravel()
        return result

    def mirrored(self, outer: Array) -> Array:
        """Return the curvature that has these in its lower triangle."""
        curvature, at = outer * _ROOT_2, self.diagonal
        curvature[at] = outer[at]
        return curvature

    def refuse(self, *args: object, **kwargs: object) -> Never:
        """Raise NotImplementedError: what natural steps do not need is not there."""
        raise NotImplementedError(f"a sparse precision {self.goes_with} only")

    left_quotient = right_quotient = gram = entries = refuse

    def cholesky_of_function(self, curvature: Array, *, function: Callable[[Array], Array]) -> None:
        """Return None: the pattern is not closed under it."""


# --- precisions that are sparse but for sums over many coordinates, as a structure: pattern, sums, and what files
# keep ---


# --- the factor of a sparse matrix plus a part of low rank, that of sums over many coordinates ---
#
# With few sums :math:`t = A \theta`, a quadratic form that is sparse in theta and t together is, in theta alone,
#
# .. math:: \Lambda = P + W A + A^T W^T,
#
# P sparse. P alone may be singular, or indefinite, where only the sum tells of a direction: an effect that moves
# against an intercept. So a diagonal K on a few coordinates E, *pins*, is added to P, and taken away again. With
# :math:`P + E K E^T = L L^T` and :math:`L^{-1} (W, A^T, E) = Q R`, the factor of Lambda is :math:`L (I + Q (B - I)
# Q^T)`. Here :math:`S = B B^T = I + R M R^T` is as small as there are sums and pins, and M has what W, A and E are
# multiplied by [1]_.
#
# The Fisher metric of a change D of Lambda, with :math:`G = L^{-1} D L^{-T}`, in Q and perpendicular to it, is
#
# .. math:: \mathrm{tr}(V D V D) = |G_{\perp\perp}|^2 + 2 \mathrm{tr}(S^{-1} G_{Q\perp} G_{\perp Q})
#     + \mathrm{tr}(S^{-1} G_{QQ} S^{-1} G_{QQ}), \qquad V = \Lambda^{-1}.
#
# References
# ----------
# .. [1] W. W. Hager (1989). Updating the inverse of a matrix. SIAM Review 31(2). https://doi.org/10.1137/1031049


#: Multiple of the diagonal that pins are; global coordinates that are pinned, at most.
_PINNED, _MOST_GLOBALS = 10.0, 16


class Sums(NamedTuple):
    """The sums beside a sparse matrix."""

    #: A; shape (n_sums, n_dim).
    weights: Array
    #: Coordinates that are pinned; shape (n_pins,).
    pins: Ints

    @classmethod
    def of(cls, weights: Array, globals_: Ints) -> Self:
        """Pin global coordinates, those first that touch most and come last, and one of large weight for each sum."""
        pins = [int(i) for i in globals_[-_MOST_GLOBALS:]]
        for row in np.abs(weights):
            free = np.setdiff1d(np.arange(len(row)), pins)
            pins.append(int(free[row[free].argmax()]))
        return cls(weights, np.array(pins, dtype=np.int64))

    def slopes(self, pattern: Pattern, values: Array) -> Array:
        """Return W, (..., n_dim, n_sums), from entries of a matrix by theta and t together."""
        n_sums, n = self.weights.shape
        of_sums = pattern.cols >= n
        between = (pattern.rows >= n) & ~of_sums
        slopes = np.zeros((*values.shape[:-1], n, n_sums))
        slopes[..., pattern.cols[between], pattern.rows[between] - n] = values[..., between]
        among = np.zeros((*values.shape[:-1], n_sums, n_sums))
        i, j = pattern.rows[of_sums] - n, pattern.cols[of_sums] - n
        among[..., i, j] = among[..., j, i] = values[..., of_sums]
        return np.asarray(slopes + 0.5 * self.weights.T @ among)


@dataclass(frozen=True, eq=False)
class Summed:
    """A symmetric matrix P + W A + A^T W^T."""

    #: The lower triangle of P; shape (n_panels,).
    panels: Array
    #: W; shape (n_dim, n_sums).
    slopes: Array


@dataclass(frozen=True, eq=False)
class SummedCholesky:
    """The factor of a matrix, or of many with one pattern: then all but the metric has their axis in front."""

    #: Of P and the pins.
    pinned: SparseCholesky
    #: shape (n_dim, n_sums).
    slopes: Array
    #: Of the pins: K; shape (n_pins,).
    strength: Array
    sums: Sums

    @classmethod
    def each(
        cls, fronts: Fronts, sums: Sums, matrix: Summed, terms: Array | None = None
    ) -> tuple["SummedCholesky", Bools]:
        """Return what became of a matrix, or of each of many, and which of them are positive definite."""
        at = fronts.diagonal[sums.pins]
        panels, strength = matrix.panels.copy(), _PINNED * np.abs(matrix.panels[..., at])
        panels[..., at] += strength
        pinned, found = SparseCholesky.each(fronts, panels, terms)
        factor = cls(pinned, matrix.slopes, strength, sums)
        return factor, np.reshape(found, panels.shape[:-1]) & factor._core[1]

    def __getitem__(self, which: Any) -> "SummedCholesky":
        """Return some of many."""
        return SummedCholesky(self.pinned[which], self.slopes[which], self.strength[which], self.sums)

    @property
    def fronts(self) -> Fronts:
        """Those of P."""
        return self.pinned.fronts

    @functools.cached_property
    def matrix(self) -> Summed:
        """What this is the factor of."""
        panels = self.pinned.matrix.copy()
        panels[self.fronts.diagonal[self.sums.pins]] -= self.strength
        return Summed(panels, self.slopes)

    # --- the part of low rank ---

    @functools.cached_property
    def _basis(self) -> tuple[Array, Array]:
        """Q, (n_dim, k), and R, (k, k)."""
        pins = np.zeros((self.fronts.n_dim, len(self.sums.pins)))
        pins[self.sums.pins, np.arange(len(self.sums.pins))] = 1.0
        beside = np.hstack([self.sums.weights.T, pins])
        beside = np.broadcast_to(beside, (*self.slopes.shape[:-1], beside.shape[1]))
        q, r = np.linalg.qr(self.pinned.solve(np.concatenate([self.slopes, beside], axis=-1)))
        return q, r

    @property
    def _q(self) -> Array:
        return self._basis[0]

    @functools.cached_property
    def _core(self) -> tuple[Array, Bools]:
        """B, and where the matrix is positive definite."""
        r, n = self._basis[1], self.slopes.shape[-1]
        middle, pins = np.zeros_like(r), 2 * n + np.arange(len(self.sums.pins))
        middle[..., :n, n : 2 * n] = middle[..., n : 2 * n, :n] = np.eye(n)
        middle[..., pins, pins] = -self.strength
        core, found = linalg.cholesky_of_each(np.eye(r.shape[-1]) + r @ middle @ r.mT)
        before = 1.0 + linalg.diagonal(np.abs(r) @ np.abs(middle) @ np.abs(r.mT))
        return core, found & (linalg.diagonal(core) > linalg.LEAST_PIVOT * np.sqrt(before)).all(axis=-1)

    @functools.cached_property
    def _b_inverse(self) -> Array:
        return np.linalg.solve(self._core[0], np.eye(self._core[0].shape[-1]))

    @functools.cached_property
    def _s_inverse(self) -> Array:
        return np.asarray(self._b_inverse.mT @ self._b_inverse)

    def _within(self, small: Array, vectors: Array) -> Array:
        """Multiply with a small matrix in the space of Q, and with the identity elsewhere."""
        return np.asarray(vectors + self._q @ ((small - np.eye(small.shape[-1])) @ (self._q.mT @ vectors)))

    # --- vectors are columns, (n_dim, n_vectors) ---

    def times(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times vectors."""
        if transposed:
            return self._within(self._core[0].mT, self.pinned.times(vectors, transposed=True))
        return self.pinned.times(self._within(self._core[0], vectors))

    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times vectors."""
        if transposed:
            return self.pinned.solve(self._within(self._b_inverse.mT, vectors), transposed=True)
        return self._within(self._b_inverse, self.pinned.solve(vectors))

    def log_det(self) -> Any:
        """Return the log determinant of the factor."""
        return self.pinned.log_det() + np.log(linalg.diagonal(self._core[0])).sum(axis=-1)

    @functools.cached_property
    def _roots(self) -> Array:
        """L^-T Q, (n_dim, k)."""
        return self.pinned.solve(self._q, transposed=True)

    @functools.cached_property
    def _beside(self) -> Array:
        """L^-T Q (I - S^-1), (n_dim, k)."""
        return self._roots - self._roots @ self._s_inverse

    def covariances(self, rows: Ints, cols: Ints, at: Ints) -> Array:
        """Return entries of the inverse, which P has at these places of its panels."""
        apart = np.einsum("...ij,...ij->...i", self._beside[..., rows, :], self._roots[..., cols, :])
        return np.asarray(self.pinned.inverse[..., at] - apart)

    # --- symmetric matrices, in numbers of which the metric is simple ---

    def whitened(self, matrix: Summed) -> Array:
        """Return the numbers of a matrix: those of L^-1 P L^-T, L^-1 W, L^-1 P L^-T Q, and of pins.

        P is pinned as that of the factor is: differences of two matrices have none of the pins.
        """
        panels = matrix.panels.copy()
        panels[self.fronts.diagonal[self.sums.pins]] += self.strength
        mapped = symmetric_times(self.fronts, panels, self._roots)
        solved = self.pinned.solve(np.hstack([matrix.slopes, mapped]))
        return self._joined(self.pinned.whitened(panels), solved, -self.strength)

    def _joined(self, sparse: Array, solved: Array, of_pins: Array) -> Array:
        n = self.slopes.shape[1]
        return np.concatenate([sparse, solved[:, :n].ravel(), solved[:, n:].ravel(), of_pins])

    def unwhitened(self, vector: Array) -> Summed:
        """Return the matrix of some numbers: the inverse of `whitened`."""
        sparse, of_slopes, _, of_pins = self._split(vector)
        panels = self.pinned.unwhitened(sparse)
        panels[self.fronts.diagonal[self.sums.pins]] += of_pins
        return Summed(panels, self.pinned.times(of_slopes))

    @functools.cached_property
    def unit(self) -> Array:
        """The numbers of the matrix itself: those of L L^T are the identity's."""
        identity, (q, r) = np.zeros(self.fronts.n_panels), self._basis
        identity[self.fronts.diagonal] = 1.0
        return self._joined(identity, np.hstack([q @ r[:, : self.slopes.shape[1]], q]), -self.strength)

    def inner(self, first: Array, second: Array) -> float:
        """Return tr(V E V F), V the inverse, of two matrices, by their numbers."""
        (sparse, q), (other, p) = self._parts(first), self._parts(second)
        a, b = self._split(first)[2], self._split(second)[2]
        # Of P alone: what is of W has A as its other side, which is in the space of Q.
        perpendicular = float(sparse @ other) - 2.0 * float(np.vdot(a, b))
        perpendicular += float(np.vdot(self._q.T @ a, self._q.T @ b))
        (beside, inside), (of_beside, of_inside) = q, p
        across = 2.0 * float(np.vdot(beside @ self._s_inverse, of_beside))
        return perpendicular + across + float(np.vdot(self._s_inverse @ inside @ self._s_inverse, of_inside))

    def product_trace(self, matrix: Summed) -> float:
        """Return the trace of the inverse times a matrix."""
        mapped = self.pinned.solve(symmetric_times(self.fronts, matrix.panels, self._roots))
        across = self._q.T @ self.pinned.solve(matrix.slopes) @ (self._q.T @ self.pinned.solve(self.sums.weights.T)).T
        inside = self._q.T @ mapped + across + across.T
        trace = self.pinned.product_trace(matrix.panels) - float(np.vdot(self._q, mapped))
        return trace + float(np.vdot(self._s_inverse, inside))

    def _split(self, vector: Array) -> tuple[Array, Array, Array, Array]:
        sizes = self.fronts.n_panels, self.slopes.size, self._q.size
        sparse, of_slopes, mapped, of_pins = np.split(vector, np.cumsum(sizes))
        return sparse, of_slopes.reshape(self.slopes.shape), mapped.reshape(self._q.shape), of_pins

    def _parts(self, vector: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the numbers of P, and G Q: what is perpendicular to Q, and in its space."""
        sparse, of_slopes, mapped, of_pins = self._split(vector)
        n = self.slopes.shape[1]
        weights, pins = self._basis[1][:, n : 2 * n], self._basis[1][:, 2 * n :]  # L^-1 (A^T, E) is Q times these
        whole = mapped + of_slopes @ weights.T + self._q @ (weights @ (of_slopes.T @ self._q))
        inside = self._q.T @ whole
        return sparse, (whole - self._q @ inside, inside + (pins * of_pins) @ pins.T)


def symmetric_times(fronts: Fronts, panels: Array, vectors: Array) -> Array:
    """Return a symmetric matrix, its lower triangle as panels, times vectors; or each of many."""
    lower = SparseCholesky(fronts, panels)
    both: Array = lower.times(vectors) + lower.times(vectors, transposed=True)
    return both - panels[..., fronts.diagonal, None] * vectors


@stored("structure.summed", content=(*_KEPT, "weights", "pins"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class SummedStructure(SparseStructure):
    """Factors of precisions that are sparse but for sums.

    A factor is held as the panels of the sparse part, pins added; the slopes; and the strength of the pins. A curvature
    is held as the numbers of `SummedCholesky.whitened`.
    """

    sums: Sums

    goes_with = "with sums goes with natural steps by exact expectations"
    is_closed = False

    @classmethod
    def of_sums(cls, summed: SummedPattern) -> Self:
        """Return the structure of a pattern with sums, in the best order that is found."""
        inner = SparseStructure.of(summed.among)
        place, last = inner.symbolic.place, inner.globals_
        return cls(inner.pattern, inner.parts, Sums.of(summed.weights, last[np.argsort(place[last])]))

    @classmethod
    def from_arrays(cls, weights: Array, pins: Ints, **of_sparse: Ints) -> Self:  # type: ignore[override]
        """Return the structure of a pattern, an order and sums; raise ValueError where they make none."""
        inner = SparseStructure.from_arrays(**of_sparse)
        weights, pins = np.asarray(weights, dtype=np.float64), np.asarray(pins, dtype=np.int64)
        if weights.ndim != 2 or weights.shape[1] != inner.n_dim or not ((pins >= 0) & (pins < inner.n_dim)).all():
            raise ValueError("the sums of the precision are none")
        return cls(inner.pattern, inner.parts, Sums(weights, pins))

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
        return super().memory_bytes(n_dim) + PER_COORDINATE * (self.n_sums + len(self.pins)) * n_dim

    def shape(self, n_dim: int) -> tuple[int, ...]:
        """Return the shape of the array."""
        return (self.n_panels + self.n_sums * self.n_dim + len(self.pins),)

    # --- factors ---

    def _cholesky(self, numbers: Array) -> SummedCholesky:
        n = self.n_panels
        first, second = n, n + self.n_sums * self.n_dim
        slopes = numbers[first:second].reshape(self.n_dim, self.n_sums)
        return SummedCholesky(SparseCholesky(self, numbers[:first]), slopes, numbers[second:], self.sums)

    def scaled(self, factor: Array, curvature: Array) -> Array | None:
        """Return the factor of the matrix of a whitened one; None where that is not positive definite."""
        known = self.cholesky_of(factor)
        terms, matrix = known.pinned.matrix[self.diagonal], known.unwhitened(curvature)
        if not linalg.all_finite(matrix.panels, matrix.slopes):
            return None
        new, found = SummedCholesky.each(self, self.sums, matrix, terms)
        if not found.all():
            return None
        numbers = np.concatenate([new.pinned.panels, new.slopes.ravel(), new.strength])
        self.remember(numbers, new)
        return numbers

    # --- curvatures ---

    def precision(self, hessian: MeanHessian) -> Summed:
        """Return minus a mean Hessian."""
        found = hessian.summed
        if found is None or not np.array_equal(found.weights, self.weights):
            raise ValueError("The Hessian of this target has other sums than the structure of the precision.")
        values = -hessian.summed_values()
        inner = found.pattern.rows < self.n_dim
        return Summed(self.panels_of(found.among, values[inner]), self.sums.slopes(found.pattern, values))


# --- precisions of one sparse pattern, many at once, and their Cholesky factors ---


#: Part of the entries from which on a matrix is one front.
_DENSE = 0.5


class Precisions:
    """Sparse precisions of one pattern, which may be by coordinates x and sums A x over many of these together."""

    def __init__(self, pattern: Pattern, weights: Array | None = None) -> None:
        self.pattern, among = pattern, pattern
        if weights is not None:
            among = SummedPattern(pattern, weights).among
        d = self.n_dim = among.n_dim
        is_dense = among.n_entries > _DENSE * d * (d + 1) / 2
        one = Supernodes(np.zeros(d, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.fronts = Fronts(among, one) if is_dense else Fronts.of(among)
        self.sums = None if weights is None else Sums.of(weights, self.fronts.globals_)
        self.inner = pattern.rows < d
        self.places = self.fronts.places(among.rows, among.cols)
        self.diagonal = np.searchsorted(pattern.rows * pattern.n_dim + pattern.cols, np.arange(d) * (pattern.n_dim + 1))
        self._weights = np.where(pattern.off_diagonal, 2.0, 1.0)

    def factored(self, precision: Array) -> tuple["Factors | None", Bools]:
        """Return the factors of those of some precisions, (n, n_entries), that have one, and which these are."""
        prices.count(prices.OF_FACTOR * len(precision) * self.seconds)
        panels = np.zeros((len(precision), self.fronts.n_panels))
        panels[:, self.places] = precision[:, self.inner]
        cholesky: SparseCholesky | SummedCholesky
        if self.sums is None:
            cholesky, there = SparseCholesky.each(self.fronts, panels)
        else:
            summed = Summed(panels, self.sums.slopes(self.pattern, precision))
            cholesky, there = SummedCholesky.each(self.fronts, self.sums, summed)
        found = Factors(self, cholesky) if there.any() else None
        return (found if found is None or there.all() else found[there]), there

    def independent(self, values: Array) -> Array:
        """Return precisions, (n, n_entries), of independent coordinates, (n, n_dim)."""
        precision = np.zeros((len(values), self.pattern.n_entries))
        precision[:, self.diagonal] = values
        return precision

    @property
    def seconds(self) -> float:
        """What a step with one takes, about."""
        n_sums = 0 if self.sums is None else len(self.sums.weights)
        return prices.of_fronts(self.fronts.n_products, self.fronts.n_fronts, n_sums)

    def trace(self, first: Array, second: Array) -> Array:
        """Return the traces of products of matrices, (n,), of which one has no other entries than these."""
        return np.einsum("ne,ne,e->n", first, second, self._weights)


@dataclass(frozen=True, eq=False)
class Factors:
    """Cholesky factors L_k of precisions."""

    of: Precisions
    cholesky: SparseCholesky | SummedCholesky

    def __getitem__(self, which: NDArray[np.generic]) -> "Factors":
        """Return some of them."""
        return Factors(self.of, self.cholesky[which])

    @functools.cached_property
    def log_det(self) -> Array:
        """Log determinants of the factors, (n,)."""
        return np.asarray(self.cholesky.log_det())

    @functools.cached_property
    def covariance(self) -> Array:
        """Entries of the covariances, (n, n_entries)."""
        of = self.of
        prices.count(prices.OF_FACTOR * len(self.log_det) * of.seconds)
        if isinstance(self.cholesky, SparseCholesky):
            return self.cholesky.inverse[:, of.places]
        rows, cols, weights, d = of.pattern.rows, of.pattern.cols, self.cholesky.sums.weights, of.n_dim
        result, inner, both = np.empty((len(self.log_det), len(rows))), of.inner, cols >= d
        result[:, inner] = self.cholesky.covariances(rows[inner], cols[inner], of.places)
        of_sums = np.broadcast_to(weights.T, (len(result), *weights.T.shape))
        of_sums = self.solve(self.solve(of_sums), transposed=True)
        across = ~inner & ~both
        result[:, across] = of_sums[:, cols[across], rows[across] - d]
        result[:, both] = (weights @ of_sums)[:, rows[both] - d, cols[both] - d]
        return result

    @property
    def entropy(self) -> Array:
        """Of the Gaussians, (n,), nats."""
        return 0.5 * self.of.n_dim * (1.0 + np.log(2.0 * np.pi)) - self.log_det

    def solve(self, columns: Array, *, transposed: bool = False) -> Array:
        """Return L_k^-1, or L_k^-T, times columns, (n, n_dim, m)."""
        return self.cholesky.solve(columns, transposed=transposed)

    def times_covariance(self, vectors: Array) -> Array:
        """Return the covariance times a vector for each, (n, n_dim)."""
        return self.solve(self.solve(vectors[:, :, None]), transposed=True)[:, :, 0]


@stored("gaussian.sparse")
@dataclass(frozen=True, eq=False)
class SparseState(Gaussian[SparseStructure]):
    """N(mean, (T T^T)^-1) with a sparse lower-triangular T in an order of elimination; the whitener is T^-T.

    Steps multiply the precision, of which a factor is found anew. With blocks beside a border that all of them touch
    [1]_, there are steps in the factor, too.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        T, with a positive diagonal, held as ``structure`` says.
    structure : SparseStructure

    References
    ----------
    .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
       approximation. https://doi.org/10.48550/arXiv.2109.00375
    """

    form: ClassVar[Any] = SparseStructure
    factor_sign = -1
    factor_name = "precision_cholesky_panels"
    exact_metric = True

    @property
    def _cholesky(self) -> Any:
        """The factor of the precision."""
        return self.structure.cholesky_of(self.factor)

    def sd(self) -> Array:
        """Return the standard deviations."""
        every = np.arange(self.n_dim)
        variances: Array = self._cholesky.covariances(every, every, self.structure.diagonal)
        return np.sqrt(variances)

    def covariances(self, rows: Indices, cols: Indices) -> Array:
        """Return entries of the covariance, (n,); those that the sparse factor has not take a solution each."""
        at, cholesky = self.structure.places(rows, cols), self._cholesky
        result: Array = cholesky.covariances(rows, cols, at)
        apart = np.flatnonzero(at < 0)
        for some in np.array_split(apart, -(-len(apart) // _AT_A_TIME) or 1):
            first, of_first = np.unique(rows[some], return_inverse=True)
            unit = np.zeros((self.n_dim, len(first)))
            unit[first, np.arange(len(first))] = 1.0
            result[some] = cholesky.solve(cholesky.solve(unit), transposed=True)[cols[some], of_first]
        return result

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return minus a mean Hessian, whitened."""
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            whitened: Array = self._cholesky.whitened(self.structure.precision(hessian))
        return whitened

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of a whitened precision M, and C M^-1 C^T C^-T times the gradient.

        None where M is not positive definite.
        """
        if self.structure.is_closed:
            return super().precision_scaled_by(matrix, grad)
        factor = self.structure.scaled(self.factor, matrix) if np.isfinite(matrix).all() else None
        if factor is None:
            return None
        new = type(self)(self.location, factor, self.structure)
        return new, new.unwhiten(new.whiten(self.dewhiten(grad)))

    def _trace(self, other: Self) -> float:
        """Return the trace of the covariance times another precision."""
        return float(self._cholesky.product_trace(other._cholesky.matrix))

    def whitened_precision(self, other: Self) -> Array:
        """Return the precision of another state, whitened."""
        return self._cholesky.whitened(other._cholesky.matrix)


# --- Gaussians whose precision is sparse but for a few sums over many coordinates, as of effects that sum to zero ---
#
# With :math:`t = A \theta` the precision is :math:`P + W A + A^T W^T`, P sparse. Hessians of log densities that are
# sparse in theta and t together are of this form, and so are averages of them: natural steps never leave it. Everything
# comes from the factor of P and from solutions by it, a few for each sum.


@stored("gaussian.summed")
@dataclass(frozen=True, eq=False)
class SummedState(SparseState):
    """N(mean, (F F^T)^-1); the whitener is F^-T. It takes natural steps from exact expectations only.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        F, held as ``structure`` says.
    structure : SummedStructure
    """

    form = SummedStructure
    factor_name = "precision_cholesky_sums"

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return curvature + value * self._cholesky.unit

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, or of two natural gradients."""
        n = len(first) - len(self._cholesky.unit)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(first[:n] @ second[:n]) + self._cholesky.inner(first[n:], second[n:])

    def _log_det(self) -> float:
        return -self._cholesky.log_det()


#: Updates, estimators and step rules that go with a precision with fill-in.
WITH_FILL = (("natural",), ("quadrature", "price"), ("linesearch", "adaptive"))
#: And with sums beside it.
WITH_SUMS = (("natural",), ("quadrature",), ("linesearch",))


def goes_with(known: Sequence[tuple[str, ...]], *given: str | None) -> bool:
    """Tell whether update, estimator and step rule are some of those that are known, as far as they are given."""
    return all(name in (None, *names) for name, names in zip(given, known, strict=True))


@stored("family.sparse", content=("structure",))
@dataclass(frozen=True)
class SparseFamily(GaussianFamily[SparseState]):
    """The Gaussians whose precision has a sparse pattern of any shape, maybe beside sums over many coordinates.

    Parameters
    ----------
    structure : SparseStructure
    """

    structure: SparseStructure

    @property
    def state(self) -> type[SparseState]:  # type: ignore[override]
        """The class of its states."""
        return SummedState if isinstance(self.structure, SummedStructure) else SparseState

    traits: ClassVar = Traits(
        name="sparse",
        also_called="sparseprecision structured hierarchical",
        states=(SparseState, SummedState),
        goes_with=OF_PRECISION,
        refuses=(
            NO_IVON,
            NO_GAUSS_NEWTON,
            Refusal(
                "update",
                ("cholesky", "sqrt"),
                "the covariance of a sparse precision is dense, and so is its factor: take update='cholesky_precision'",
            ),
            Refusal(
                "update",
                ("natural_pd",),
                "its correction squares a matrix, which fills it in: take update='natural', whose steps are shortened "
                "instead",
            ),
            Refusal(
                "step",
                ("decay",),
                "decay averages moments, and a mean of covariances has no sparse inverse: take step='constant' or "
                "'proximal'",
            ),
        ),
        factors=("precision",),
        from_structure=True,
    )

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family with the structure of the model's Hessian; raise ValueError if that counts as dense.

        With fill-in where that costs less than blocks beside a border, and the steps are those that it goes with.
        """
        given = (options.update, options.estimator, options.step)
        may_fill = options.step is not None and goes_with(WITH_FILL, *given)  # components of mixtures have no step rule
        structure = model.structure(fill=may_fill, sums=may_fill and goes_with(WITH_SUMS, *given))
        if structure is None:
            raise ValueError(
                "A sparse precision saves work only where the Hessian of log p has zeros, and this one has too few: it "
                "counts as dense. Take family='full', 'block' or 'diagonal', or such components."
            )
        return cls(structure)


# --- from the pattern of a precision to a form of its factor: blocks beside a border, or what elimination fills in ---
#
# A border that touches everything (global parameters) shows by its degree in the graph of the pattern. Where what is
# left falls into small components, these are the blocks. Where it does not (a chain in time, a map of regions), some
# *level sets* of a breadth-first search are put into the border as well [1]_: each separates what is nearer from what
# is further.
#
# References
# ----------
# .. [1] A. George and J. W. H. Liu (1978). An automatic nested dissection algorithm for irregular finite element
#    problems. SIAM Journal on Numerical Analysis 15(5). https://doi.org/10.1137/0715069

#: Borders tried at most: those of as many different degrees.
_N_DEGREES = 24
#: Smallest borders whose large components are cut.
_N_CUT = 3
#: Size of a component beyond which it is worth cutting.
_LARGE = 24
#: Levels between two separators that are tried: 2, 3, 4, 6, 8, 12, ..., 256.
_SPACINGS = sorted({m << k for m in (2, 3) for k in range(8)})[:-1]


_remembered = functools.lru_cache(maxsize=4)

#: Of each coordinate's block; -1 in the border; shape (n_dim,).


@_remembered
def find_blocks(pattern: Pattern) -> Partition:
    """Return the blocks beside a border with which steps cost least."""
    graph = pattern.matrix
    candidates = [*by_degree(graph), by_independence(graph)]
    # Chains and fields are the large components beside a small border.
    beside = sorted(candidates, key=lambda labels: int(np.sum(labels < 0)))[:_N_CUT]
    candidates += [cut for candidate in beside for cut in _by_level(graph, candidate)]
    return Partition(
        min(candidates, key=lambda labels: step_flops(np.bincount(labels[labels >= 0]), int(np.sum(labels < 0))))
    )


def step_flops(sizes: NDArray[np.integer], n_border: int) -> float:
    """Return the cost of the linear algebra of one step, to a factor: blocks of ``sizes`` beside a border."""
    return prices.parts_of_blocks(sizes, n_border)[0] + 10.0 * float(sizes.sum())


def by_degree(graph: sparse.csr_array) -> list[Indices]:
    """Put coordinates of high degree into the border."""
    degrees = np.diff(graph.indptr)
    distinct = np.unique(degrees)
    tried = distinct[np.unique(np.linspace(0, len(distinct) - 1, _N_DEGREES).astype(int))]
    return [dissected(graph, degrees > limit) for limit in tried] + [dissected(graph, degrees >= 0)]


def dissected(graph: sparse.csr_array, border: Bools) -> Indices:
    """Return the components of what is not in the border."""
    labels = np.full(len(border), -1, dtype=np.intp)
    inside = np.flatnonzero(~border)
    if len(inside):
        labels[inside] = csgraph.connected_components(graph[inside][:, inside], directed=False)[1]
    return labels


def _by_level(graph: sparse.csr_array, labels: Indices) -> list[Indices]:
    """Cut large components by level sets."""
    sizes = np.bincount(labels[labels >= 0], minlength=1)
    large = np.flatnonzero(sizes > _LARGE)
    if len(large) == 0 or len(large) > _N_DEGREES:  # many large blocks: these are groups
        return []
    level = np.zeros(len(labels), dtype=np.intp)
    for block in large:
        inside = np.flatnonzero(labels == block)
        level[inside] = _levels(graph[inside][:, inside])
    cut = np.isin(labels, large)
    spacings = [m for m in _SPACINGS if m <= level.max()]
    return [dissected(graph, (labels < 0) | (cut & (level % m == m - 1))) for m in spacings]


def _levels(graph: sparse.csr_array) -> Indices:
    """Return the distance of each vertex of a connected graph from one at its rim."""
    distance = np.zeros(graph.shape[0])
    for _ in range(3):
        distance = csgraph.dijkstra(graph, directed=False, indices=int(np.argmax(distance)), unweighted=True)
    return distance.astype(np.intp)


def by_independence(graph: sparse.csr_array) -> Indices:
    """Leave out of the border a largest set of coordinates that touch each other nowhere, as far as it is found.

    Those of low degree first; equals in an arbitrary order that is always the same: in that of their indices, a chain
    would take a round for each coordinate.
    """
    n_dim = graph.shape[0]
    ties = np.random.default_rng(0).permutation(n_dim)
    rank = np.argsort(np.lexsort((ties, np.diff(graph.indptr)))).astype(np.float64) + 1.0
    links = (graph.astype(np.float64) - sparse.diags_array(graph.diagonal().astype(np.float64))).tocsr()
    links.eliminate_zeros()
    linked, chosen, open_ = (
        np.flatnonzero(np.diff(links.indptr)),
        np.zeros(n_dim, dtype=bool),
        np.ones(n_dim, dtype=bool),
    )
    while open_.any():
        rank_left, nearest = np.where(open_, rank, np.inf), np.full(n_dim, np.inf)
        nearest[linked] = np.minimum.reduceat(rank_left[links.indices], links.indptr[linked])
        new = open_ & (rank < nearest)
        chosen |= new
        open_ &= ~new & ~(links @ new.astype(np.float64) > 0.0)
    # A single one is independent of nothing: the pattern is dense.
    return dissected(graph, ~chosen | (chosen.sum() == 1))


# --- what elimination fills in, where it costs less than blocks, and with sums beside ---


#: Pairs of coordinates in sums, beyond which the precision is not looked at without these.
_MANY_PAIRS = 1e6
#: Part of the cost of a step with blocks, beyond which these stay.
_MUCH = 0.8
#: Seconds of such a step up to which nothing else is looked for: to find it takes longer than all steps would gain.
_LITTLE = 4e-3


@_remembered
def find_filled(pattern: Pattern) -> SparseStructure | None:
    """Return the structure of a factor with fill-in, where its steps cost less than with blocks; None elsewhere."""
    of_blocks = step_seconds(find_blocks(pattern))
    if of_blocks < _LITTLE:
        return None
    structure = SparseStructure.of(pattern)
    return structure if step_seconds(structure) < _MUCH * of_blocks else None


find_summed = _remembered(SummedStructure.of_sums)


def cheapest_form(
    summed: SummedPattern | None, pattern: Callable[[], Pattern | None]
) -> Partition | SparseStructure | None:
    """Return the form of a factor that costs least: blocks beside a border, or with fill-in; None where it is dense."""
    beside = None if summed is None else find_summed(summed)
    if beside is not None and summed is not None and summed.n_pairs > _MANY_PAIRS:
        return beside
    without = pattern()
    forms = [beside] if without is None else [find_filled(without), find_blocks(without), beside]
    return min((form for form in forms if form is not None), key=step_seconds, default=None)


@_remembered
def structure_of(form: Partition | SparseStructure) -> SparseStructure:
    """Return the structure of a form."""
    return form if isinstance(form, SparseStructure) else SparseStructure.of_blocks(form)


def step_seconds(form: Partition | SparseStructure) -> float:
    """Return the seconds of the linear algebra of one step, with blocks beside a border, or with fronts."""
    if isinstance(form, SparseStructure):
        n_sums = form.n_sums if isinstance(form, SummedStructure) else 0
        return prices.OF_STEP + prices.of_fronts(form.n_products, form.n_fronts, n_sums)
    return prices.of_blocks(form.sizes, len(form.border))
