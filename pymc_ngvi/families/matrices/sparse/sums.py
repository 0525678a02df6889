r"""The factor of a sparse matrix plus a part of low rank, that of sums over many coordinates.

With few sums :math:`t = A \theta`, a quadratic form that is sparse in theta and t together is, in theta alone,

.. math:: \Lambda = P + W A + A^T W^T,

P sparse. P alone may be singular, or indefinite, where only the sum tells of a direction: an effect that moves against
an intercept. So a diagonal K on a few coordinates E, *pins*, is added to P, and taken away again. With
:math:`P + E K E^T = L L^T` and :math:`L^{-1} (W, A^T, E) = Q R`, the factor of Lambda is
:math:`L (I + Q (B - I) Q^T)`. Here :math:`S = B B^T = I + R M R^T` is as small as there are sums and pins, and M has
what W, A and E are multiplied by [1]_.

The Fisher metric of a change D of Lambda, with :math:`G = L^{-1} D L^{-T}`, in Q and perpendicular to it, is

.. math:: \mathrm{tr}(V D V D) = |G_{\perp\perp}|^2 + 2 \mathrm{tr}(S^{-1} G_{Q\perp} G_{\perp Q})
    + \mathrm{tr}(S^{-1} G_{QQ} S^{-1} G_{QQ}), \qquad V = \Lambda^{-1}.

References
----------
.. [1] W. W. Hager (1989). Updating the inverse of a matrix. SIAM Review 31(2). https://doi.org/10.1137/1031049
"""

import functools

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.any_fronts import AnyFronts
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts
from pymc_ngvi.families.matrices.sparse.order import Ints

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
