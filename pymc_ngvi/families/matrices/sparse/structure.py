"""Cholesky factors of sparse precisions as a structure: the pattern, its fronts, and how files keep them."""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Ints, Supernodes
from pymc_ngvi.families.matrices.structure import Structure

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

    globals_ = property(lambda self: self.fronts.globals_)

    @functools.cached_property
    def of_globals(self) -> NDArray[np.bool_]:
        """Which entries of panels are in a row of a global coordinate."""
        return self.fronts.in_last(len(self.globals_))

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

    def cholesky_of(self, factor: Array) -> Any:
        """Return the factor that solves, and knows entries of its inverse."""
        return self.factor(factor)

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self._by_columns(self.cholesky_of(factor).times, vectors, transposed)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self._by_columns(self.cholesky_of(factor).solve, vectors, transposed)

    def _by_columns(self, operation: Callable[..., Array], vectors: Array, transposed: bool) -> Array:
        rows = vectors.reshape(-1, self.n_dim)
        return np.ascontiguousarray(operation(rows.T, transposed=transposed).T).reshape(vectors.shape)

    def _inverse(self, factor: Array, rows: Ints, cols: Ints, at: Ints) -> Array:
        """Return entries of the covariance at places that the sparse factor has."""
        return self.factor(factor).inverse[at]

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations."""
        every = np.arange(self.n_dim)
        return np.sqrt(self._inverse(factor, every, every, self.fronts.diagonal))

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,); those that the sparse factor has not take a solution each."""
        at = self.places(rows, cols)
        result = self._inverse(factor, rows, cols, at)
        apart = np.flatnonzero(at < 0)
        for some in np.array_split(apart, -(-len(apart) // _AT_A_TIME) or 1):
            first, of_first = np.unique(rows[some], return_inverse=True)
            unit = np.zeros((self.n_dim, len(first)))
            unit[first, np.arange(len(first))] = 1.0
            cholesky = self.cholesky_of(factor)
            result[some] = cholesky.solve(cholesky.solve(unit), transposed=True)[cols[some], of_first]
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


class Summed(NamedTuple):
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
    def of(cls, fronts: Fronts, sums: Sums, matrix: Summed, terms: Array | None = None) -> "SummedCholesky | None":
        """Return the factor of a matrix; None where that is not positive definite."""
        if not linalg.all_finite(*matrix):
            return None
        factor, found = cls.each(fronts, sums, matrix, terms)
        return factor if found.all() else None

    @classmethod
    def each(
        cls, fronts: Fronts, sums: Sums, matrix: Summed, terms: Array | None = None
    ) -> tuple["SummedCholesky", NDArray[np.bool_]]:
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
    def _core(self) -> tuple[Array, NDArray[np.bool_]]:
        """B, and where the matrix is positive definite."""
        r, n = self._basis[1], self.slopes.shape[-1]
        middle, pins = np.zeros_like(r), 2 * n + np.arange(len(self.sums.pins))
        middle[..., :n, n : 2 * n] = middle[..., n : 2 * n, :n] = np.eye(n)
        middle[..., pins, pins] = -self.strength
        core, found = linalg.cholesky_of_each(np.eye(r.shape[-1]) + r @ middle @ r.mT)
        before = 1.0 + linalg.diagonal(np.abs(r) @ np.abs(middle) @ np.abs(r.mT))
        return core, found & (linalg.diagonal(core) > linalg.LEAST_PIVOT * np.sqrt(before)).all(axis=-1)

    @property
    def _b(self) -> Array:
        return self._core[0]

    @functools.cached_property
    def _b_inverse(self) -> Array:
        return np.linalg.solve(self._b, np.eye(self._b.shape[-1]))

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
            return self._within(self._b.mT, self.pinned.times(vectors, transposed=True))
        return self.pinned.times(self._within(self._b, vectors))

    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times vectors."""
        if transposed:
            return self.pinned.solve(self._within(self._b_inverse.mT, vectors), transposed=True)
        return self._within(self._b_inverse, self.pinned.solve(vectors))

    def log_det(self) -> Any:
        """Return the log determinant of the factor."""
        return self.pinned.log_det() + np.log(linalg.diagonal(self._b)).sum(axis=-1)

    @functools.cached_property
    def _roots(self) -> Array:
        """L^-T Q, (n_dim, k)."""
        return self.pinned.solve(self._q, transposed=True)

    @functools.cached_property
    def _beside(self) -> Array:
        """L^-T Q (I - S^-1), (n_dim, k)."""
        return self._roots - self._roots @ self._s_inverse

    def inverse(self, rows: Ints, cols: Ints, at: Ints) -> Array:
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
        mapped = _symmetric_times(self.fronts, panels, self._roots)
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
        mapped = self.pinned.solve(_symmetric_times(self.fronts, matrix.panels, self._roots))
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


def _symmetric_times(fronts: Fronts, panels: Array, vectors: Array) -> Array:
    """Return a symmetric matrix, its lower triangle as panels, times vectors."""
    lower = SparseCholesky(fronts, panels)
    both: Array = lower.times(vectors) + lower.times(vectors, transposed=True)
    return both - panels[fronts.diagonal][:, None] * vectors


#: Numbers of a row and column of a sum for each coordinate, at the peak of a fit.
_PER_COORDINATE = 60
#: Relative difference of two vectors that is rounding.
_SAME_SUM = 1e-12


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

    cholesky_of = summed

    def _inverse(self, factor: Array, rows: Ints, cols: Ints, at: Ints) -> Array:
        return self.summed(factor).inverse(rows, cols, at)

    # --- curvatures ---

    def summed_precision(self, hessian: MeanHessian) -> Summed:
        """Return minus a mean Hessian."""
        found = hessian.summed
        if found is None or not np.array_equal(found.weights, self.weights):
            raise ValueError("The Hessian of this target has other sums than the structure of the precision.")
        values = -hessian.summed_values()
        inner = found.pattern.rows < self.n_dim
        return Summed(self.panels_of(found.among, values[inner]), self.sums.slopes(found.pattern, values))

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
    most = _SAME_SUM * (abs(of_unit) + abs(of_other)) * (np.abs(unit) + np.abs(other))
    return (of_unit, of_other) if (rest <= most).all() else None
