"""Precisions that are sparse but for sums over many coordinates, as a structure: pattern, sums, and what files keep."""

import functools

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import SummedPattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import AnyFronts, Fronts
from pymc_ngvi.families.matrices.sparse.order import Ints
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure

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


class Summed(NamedTuple):
    """A symmetric matrix P + W A + A^T W^T."""

    #: The lower triangle of P; shape (n_panels,).
    panels: Array
    #: W; shape (n_dim, n_sums).
    slopes: Array


@dataclass(frozen=True, eq=False)
class SummedCholesky:
    """A factor of a matrix that is positive definite."""

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
        at = fronts.diagonal[sums.pins]
        panels, strength = matrix.panels.copy(), _PINNED * np.abs(matrix.panels[at])
        panels[at] += strength
        pinned = SparseCholesky.of(fronts, panels, terms)
        if pinned is None:
            return None
        factor = cls(pinned, matrix.slopes, strength, sums)
        return None if factor._core is None else factor

    @property
    def fronts(self) -> AnyFronts:
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
        pins = np.zeros((self.fronts.n_dim, len(self.strength)))
        pins[self.sums.pins, np.arange(len(self.strength))] = 1.0
        q, r = np.linalg.qr(self.pinned.solve(np.hstack([self.slopes, self.sums.weights.T, pins])))
        return q, r

    @property
    def _q(self) -> Array:
        return self._basis[0]

    @functools.cached_property
    def _core(self) -> Array | None:
        """B; None where the matrix is not positive definite."""
        r, n = self._basis[1], self.slopes.shape[1]
        middle = np.zeros_like(r)
        middle[:n, n : 2 * n] = middle[n : 2 * n, :n] = np.eye(n)
        middle[2 * n :, 2 * n :] = -np.diag(self.strength)
        try:
            core: Array = np.linalg.cholesky(np.eye(len(r)) + r @ middle @ r.T)
        except np.linalg.LinAlgError:
            return None
        before = 1.0 + np.diagonal(np.abs(r) @ np.abs(middle) @ np.abs(r.T))
        return core if (np.diagonal(core) > linalg.LEAST_PIVOT * np.sqrt(before)).all() else None

    @functools.cached_property
    def _b(self) -> Array:
        core = self._core
        assert core is not None  # that is seen when a factor is made
        return core

    @functools.cached_property
    def _b_inverse(self) -> Array:
        return linalg.solve_lower(self._b, np.eye(len(self._b)))

    @functools.cached_property
    def _s_inverse(self) -> Array:
        return self._b_inverse.T @ self._b_inverse

    def _within(self, small: Array, vectors: Array) -> Array:
        """Multiply with a small matrix in the space of Q, and with the identity elsewhere."""
        return vectors + self._q @ ((small - np.eye(len(small))) @ (self._q.T @ vectors))

    # --- vectors are columns, (n_dim, n_vectors) ---

    def times(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times vectors."""
        if transposed:
            return self._within(self._b.T, self.pinned.times(vectors, transposed=True))
        return self.pinned.times(self._within(self._b, vectors))

    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times vectors."""
        if transposed:
            return self.pinned.solve(self._within(self._b_inverse.T, vectors), transposed=True)
        return self._within(self._b_inverse, self.pinned.solve(vectors))

    def log_det(self) -> float:
        """Return the log determinant of the factor."""
        return self.pinned.log_det() + float(np.sum(np.log(np.diagonal(self._b))))

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
        apart = np.einsum("ij,ij->i", self._beside[rows], self._roots[cols])
        return self.pinned.inverse[at] - apart

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


def _symmetric_times(fronts: AnyFronts, panels: Array, vectors: Array) -> Array:
    """Return a symmetric matrix, its lower triangle as panels, times vectors."""
    lower = SparseCholesky(fronts, panels)
    both: Array = lower.times(vectors) + lower.times(vectors, transposed=True)
    return both - panels[fronts.diagonal][:, None] * vectors


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
