r"""The Cholesky factor of a sparse matrix, solutions, the inverse on its entries, and the metric of Gaussians.

A precision S = L L^T whose pattern is that of L + L^T has no entry that its factor would fill in. On such matrices,
:math:`\mathrm{tr}(S^{-1} E S^{-1} E)`, the Fisher metric of a Gaussian, is a sum of squares of as many numbers as L has
[1]_: with :math:`S_N = L_N L_N^T` what is left of a front's own block when its turn comes, B what is beside,
:math:`G = L_{BN} L_N^{-1}`, :math:`V = S^{-1}`, and E carried along as the elimination goes,

.. math:: \sum_N |L_N^{-1} E_N L_N^{-T}|^2 + 2 |R^T (E_B - G E_N) L_N^{-T}|^2, \qquad R R^T = V_{BB}.

References
----------
.. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
   Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353
"""

import functools

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from pymc_ngvi.core import linalg
from pymc_ngvi.core.memory import no_collections
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.fronts import LARGE, Fronts, Ints

_blas = functools.cache(ThreadpoolController)


def _run(kernel: str, fronts: Fronts, *args: Any) -> Any:
    """Run what Numba compiles; BLAS keeps to one thread: fronts are small, and to wake others takes longer than these.

    To import Numba takes half a second, which small dense models need not wait for.
    """
    with no_collections(), _blas().limit(limits=1, user_api="blas") if fronts.n_products > LARGE else nullcontext():
        from pymc_ngvi.families.matrices.sparse import kernels

        return getattr(kernels, kernel)(*args)


@dataclass(frozen=True, eq=False)
class SparseCholesky:
    """The factor L of a sparse matrix, or of many with one pattern, in the order of elimination."""

    fronts: Fronts
    #: The columns of L; shape (n_panels,), or (n, n_panels): what is said of one holds of each of many.
    panels: Array

    @classmethod
    def of(cls, fronts: Fronts, matrix: Array, terms: Array | None = None) -> "SparseCholesky | None":
        """Return the factor of a matrix, or that of each of many; None where one of them is not positive definite."""
        factor, found = cls.each(fronts, matrix, terms)
        return factor if found.all() else None

    @classmethod
    def each(
        cls, fronts: Fronts, matrix: Array, terms: Array | None = None
    ) -> tuple["SparseCholesky", NDArray[np.bool_]]:
        """Return what became of a matrix, or of each of many, and which of them are positive definite."""
        sizes = np.zeros((0, 0)) if terms is None else _rows(terms)
        given = fronts.layout.table, fronts.layout.inner, fronts.layout.n_held, fronts.diagonal
        panels, found = _run("factor", fronts, *given, _rows(matrix), sizes, linalg.LEAST_PIVOT)
        return cls(fronts, panels.reshape(matrix.shape)), found

    def __getitem__(self, which: Any) -> "SparseCholesky":
        """Return some of many."""
        return SparseCholesky(self.fronts, self.panels[which])

    def log_det(self) -> Any:
        """Return the log determinant of L."""
        return np.log(self.panels[..., self.fronts.diagonal]).sum(axis=-1)

    # --- vectors are columns, (n_dim, n_vectors), in the order of the coordinates ---

    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L^-1, or L^-T, times vectors."""
        return self._multiplied(vectors, True, transposed)

    def times(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L, or L^T, times vectors."""
        return self._multiplied(vectors, False, transposed)

    def _multiplied(self, vectors: Array, inverse: bool, transposed: bool) -> Array:
        panels, s = _rows(self.panels), self.fronts.symbolic
        x = vectors.take(self.fronts.order, axis=-2).astype(np.float64, copy=False).reshape(len(panels), -1)
        given = self.fronts.layout.table, s.beside, panels, x
        _run("multiply", self.fronts, *given, vectors.shape[-1], inverse, transposed)
        return x.reshape(vectors.shape).take(s.place, axis=-2)

    # --- matrices in the form of panels ---

    @property
    def unit(self) -> Array:
        """The identity, and so the matrix itself, whitened."""
        identity = np.zeros_like(self.panels)
        identity[..., self.fronts.diagonal] = 1.0
        return identity

    def _on_fronts(self, kernel: str, *matrices: Array) -> Any:
        """Return what becomes of matrices."""
        layout = self.fronts.layout
        numbers = (_rows(matrix) for matrix in (self.panels, *matrices))
        found = _run(kernel, self.fronts, layout.table, layout.inner, layout.n_held, *numbers)
        return found.reshape(self.panels.shape)

    @functools.cached_property
    def matrix(self) -> Array:
        """The lower triangle of L L^T."""
        return self._on_fronts("matrix")

    @functools.cached_property
    def inverse(self) -> Array:
        """The inverse of L L^T where the lower triangle can differ from 0."""
        return self._on_fronts("inverse")

    def covariances(self, rows: Ints, cols: Ints, at: Ints) -> Array:
        """Return entries of the inverse, which are at these places of the panels."""
        return self.inverse[at]

    def product_trace(self, matrix: Array) -> float:
        """Return the trace of the inverse times a symmetric matrix, as panels."""
        at = self.fronts.diagonal
        return float(2.0 * (self.inverse @ matrix) - self.inverse[at] @ matrix[at])

    @functools.cached_property
    def _roots(self) -> Array:
        """Of each front, the root of the inverse beside."""
        layout = self.fronts.layout
        given = layout.table, layout.inner, layout.n_held, layout.n_roots
        roots, found = _run("roots", self.fronts, *given, _rows(self.inverse))
        if not found.all():
            raise np.linalg.LinAlgError("The precision is singular to rounding.")
        return roots

    def whitened(self, matrix: Array) -> Array:
        """Return a vector whose inner products are tr(V E V F), V the inverse, for symmetric matrices as panels."""
        return self._on_fronts("whiten", self._roots, matrix)

    def unwhitened(self, vector: Array) -> Array:
        """Return the matrix of a vector: the inverse of `whitened`."""
        return self._on_fronts("unwhiten", self._roots, vector)


def _rows(numbers: Array) -> Array:
    """Return numbers of one matrix as those of each of one."""
    return np.require(np.atleast_2d(numbers), np.float64, ("C", "W"))  # other arrays would be compiled for anew
