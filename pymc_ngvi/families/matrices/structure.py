"""Structures of matrices: diagonal and dense ones; coordinates in blocks that are independent given the others."""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core import linalg
from pymc_ngvi.core.linalg import ROUNDING, relative_terms
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import AnyArray, Array, MeanHessian


class Stack(NamedTuple):
    """All blocks of one size."""

    n_blocks: int
    size: int
    #: Its coordinates in `Partition.order`.
    where: slice


@stored("partition")
@dataclass(frozen=True, eq=False)
class Partition:
    """Coordinates are *local*, in blocks that touch each other nowhere, or in the *border*, which all blocks may touch.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block; negative in the border.

    Raises
    ------
    ValueError
        If labels are not (n_dim,).
    """

    labels: NDArray[np.intp]

    def __post_init__(self) -> None:
        labels = np.maximum(np.asarray(self.labels).astype(np.intp), -1)
        if labels.ndim != 1:
            raise ValueError(f"Labels of blocks should be (n_dim,); got shape {labels.shape}.")
        object.__setattr__(self, "labels", _read_only(labels))

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.labels)

    @functools.cached_property
    def locals_(self) -> NDArray[np.intp]:
        """Local coordinates, ascending."""
        return np.flatnonzero(self.labels >= 0)

    @functools.cached_property
    def border(self) -> NDArray[np.intp]:
        """The others; lower triangles are those of this order."""
        return np.flatnonzero(self.labels < 0)

    @property
    def n_local(self) -> int:
        """Number of local coordinates."""
        return len(self.locals_)

    @property
    def n_border(self) -> int:
        """Number of coordinates in the border."""
        return len(self.border)

    @functools.cached_property
    def sizes(self) -> NDArray[np.intp]:
        """Of the blocks, ascending."""
        return _read_only(np.sort(np.unique(self.labels[self.locals_], return_counts=True)[1]))

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """Coordinates, (n_dim,): blocks by size, then by first coordinate, ascending in each; then the border."""
        _, first, inverse, counts = np.unique(
            self.labels[self.locals_], return_index=True, return_inverse=True, return_counts=True
        )
        local = np.lexsort((self.locals_, first[inverse], counts[inverse]))
        return _read_only(np.concatenate([self.locals_[local], self.border]))

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks by size."""
        sizes, counts = np.unique(self.sizes, return_counts=True)
        stop = np.cumsum(sizes * counts)
        rows = zip(counts.tolist(), sizes.tolist(), map(slice, stop - sizes * counts, stop), strict=True)
        return tuple(Stack(*row) for row in rows)

    def in_blocks(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where entries inside blocks are in a list of these, in this order and each in C order."""
        size, place = np.repeat(self.sizes, self.sizes), np.argsort(self.order)
        first = np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        return (np.cumsum(size) - size - first)[place[rows]] + place[cols]

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Entries of a symmetric matrix with these blocks, and with a border that touches everything."""
        n, local, border = self.n_dim, self.locals_, self.border
        shape = n, int(self.labels.max(initial=-1)) + 1
        member = sparse.csr_array((np.ones(len(local)), (local, self.labels[local])), shape=shape)
        rows, cols = (member @ member.T).nonzero()
        rows, cols = np.append(rows, np.repeat(border, n)), np.append(cols, np.tile(np.arange(n), len(border)))
        return Pattern.of(sparse.coo_array((np.ones(len(rows)), (rows, cols)), shape=(n, n)))


def _read_only[A: NDArray[Any]](array: A) -> A:
    """Protect an array: one partition serves many states."""
    array.flags.writeable = False
    return array


# --- what a structure of matrices can do: the operations that all Gaussians are written with ---

LOG_2PI = float(np.log(2 * np.pi))
#: Bytes of a fit at its peak, beyond the model's own: for each coordinate, and for each entry of a factor.
PER_COORDINATE, PER_ENTRY = 512, 448
#: Columns for each outer product, beyond which adding these one by one is quicker than a matrix product.
SUFFIX_SUMS = 40


@dataclass(frozen=True)
class Structure:
    """Matrices with zeros in the same places, each held as one array: here all matrices; others say what they do else.

    A *factor* is lower triangular with a diagonal that is not 0, maybe in another order of the coordinates; with the
    others of its structure it is closed under products and inverses. A *curvature* is symmetric, and can differ from 0
    where a factor or its transpose can. Vectors are rows: (..., n_dim). What is said of dense factors, curvatures and
    outer products holds of each of a stack, too.
    """

    #: Of each entry: the coordinate of its column, as an index into (n_dim,) that broadcasts.
    columns: ClassVar[Any] = slice(None)

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return n_dim * (n_dim + 1) // 2

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 matrices.

        The curvature of each of eight replicates, the noise of each, and up to twelve vectors of secant pairs.
        """
        return PER_ENTRY * n_dim * n_dim

    def on_diagonal(self, matrix: Array) -> Any:
        """Return where the raveled array has the diagonal, in the order of the coordinates."""
        return slice(None, None, len(matrix) + 1)

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""
        return np.diag(entries)

    def dense(self, curvature: Array) -> Array:
        """Return a symmetric matrix as (n_dim, n_dim)."""
        return curvature

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices, by name."""
        return {}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays, which may have others among them."""
        return cls()

    # --- factors and vectors ---

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return _product(vectors, factor if transposed else factor.mT)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector, (n_dim,) or (n_vectors, n_dim)."""
        columns = vectors if vectors.ndim == 1 else vectors.mT
        solution = linalg.solve_lower(factor, columns, transpose=transposed)
        return solution if vectors.ndim == 1 else solution.mT

    def squares(self, factor: Array, sign: int, vectors: Array) -> Array:
        """Return v^T P v for the precision P of each vector, where the factor is of the covariance, or of P."""
        half = self.solve(factor, vectors) if sign > 0 else self.times(factor, vectors, transposed=True)
        return np.sum(half * half, axis=-1)

    # --- factors ---

    def product(self, left: Array, right: Array) -> Array:
        """Return the product of two factors."""
        return _product(left, right)

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first factor times the second one."""
        return linalg.solve_lower(left, right)

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first factor times the inverse of the second one."""
        return linalg.solve_lower(right, left.mT, transpose=True).mT

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return F F^T, or F^T F."""
        return _product(factor.mT, factor) if transposed else _product(factor, factor.mT)

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations for a factor of the covariance, or, for sign -1, of the precision."""
        root = factor if sign > 0 else linalg.solve_lower(factor, np.eye(len(factor))).T
        return np.sqrt(np.einsum("...ij,...ij->...i", root, root))

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of F F^T, (n,), or, for sign -1, of its inverse."""
        if rows is cols or np.array_equal(rows, cols):
            return self.sd(factor, sign)[rows] ** 2
        root = factor if sign > 0 else linalg.solve_lower(factor, np.eye(len(factor))).T
        return (root @ root.T)[rows, cols]

    # --- curvatures ---

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return -C^T H C with the mean Hessian H and C = F, or, for sign -1, C = F^-T."""
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            if sign > 0:
                return linalg.symmetrise(-(hessian.products(np.ascontiguousarray(factor.T)) @ factor))
            half = linalg.solve_lower(factor, hessian.products(np.eye(len(factor))).T)
            return linalg.symmetrise(-linalg.solve_lower(factor, half.T))

    def squared(self, curvature: Array) -> Array:
        """Return A A; not every structure is closed under it."""
        return _product(curvature, curvature)

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the factor L with A = L L^T, in reverse L^T L; None where A is not positive definite.

        Its diagonal counts as sums with 1, as those of relative precisions are: see `linalg.relative_terms`.
        """
        terms = linalg.relative_terms(linalg.diagonal(curvature))
        if not reverse:
            return linalg.cholesky(curvature, terms)
        upper = linalg.reverse_cholesky(curvature, terms)
        return None if upper is None else upper.mT

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return L with f(A) = L^T L for a positive function of the eigenvalues.

        None where that is not finite, or where values are so far apart that rounding hides the small ones.
        """
        eigenvalues, vectors = np.linalg.eigh(curvature)
        with np.errstate(all="ignore"):
            values = function(eigenvalues)
        if not (np.isfinite(values) & (values > 0.0)).all():
            return None
        lower = linalg.cholesky_of_product((vectors * np.sqrt(values)[..., None, :])[..., ::-1, :])
        return None if lower is None else np.ascontiguousarray(lower[..., ::-1, ::-1]).mT

    def half(self, curvature: Array) -> Array:
        """Return the lower triangle with a halved diagonal."""
        return linalg.lower_triangle(curvature, 0.5)

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the entries that a factor has of F^-T A."""
        return np.tril(linalg.solve_lower(factor, curvature, transpose=True))

    # --- outer products ---

    def outer(self, left: Array, right: Array) -> Array:
        """Return the mean of left_b right_b^T, in the form of a curvature that is not symmetric."""
        return left.mT @ (right / left.shape[-2])

    def lower(self, outer: Array) -> Array:
        """Return the entries of a factor."""
        return linalg.lower_triangle(outer)

    def mirrored(self, outer: Array) -> Array:
        """Return the curvature that has these in its lower triangle."""
        below = linalg.lower_triangle(outer, 0.0)
        result: Array = below + below.mT
        linalg.diagonal(result)[:] = linalg.diagonal(outer)
        return result

    def times_lower_half(self, factor: Array, left: Array, right: Array) -> Array:
        """Return the factor times the lower triangle of the mean of left_b right_b^T with a halved diagonal.

        Few outer products take O(n_dim^2): sums over the columns from j on are suffix sums.
        """
        if factor.shape[-1] <= SUFFIX_SUMS * left.shape[-2]:
            return self.product(factor, self.half(self.outer(left, right)))
        total = np.zeros_like(factor)
        for a, b in zip(np.moveaxis(left, -2, 0), np.moveaxis(right, -2, 0), strict=True):
            terms = factor * a[..., None, :]
            sums = np.cumsum(terms[..., ::-1], axis=-1)[..., ::-1]
            total += (sums - 0.5 * terms) * (b[..., None, :] / left.shape[-2])
        return total


def _product(left: Array, right: Array) -> Array:
    """Return the product; for stacks of numbers, that of 1 x 1 matrices would take ten times as long."""
    return left * right if right.ndim > 2 and right.shape[-1] == 1 else left @ right


#: All matrices.
Dense = Structure


# --- diagonal matrices, each held as its diagonal, (n_dim,) ---


@dataclass(frozen=True)
class Diagonal(Structure):
    """Diagonal matrices: every operation is that on numbers, coordinate by coordinate."""

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return n_dim

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return PER_COORDINATE * n_dim

    def on_diagonal(self, matrix: Array) -> slice:
        """Return where the array has the diagonal: everywhere."""
        return slice(None)

    def from_diagonal(self, entries: Array) -> Array:
        """Return the diagonal."""
        return entries

    def dense(self, curvature: Array) -> Array:
        """Return the matrix as (n_dim, n_dim)."""
        return np.diag(curvature)

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the matrix times each vector."""
        return vectors * factor

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse times each vector."""
        return vectors / factor

    def product(self, left: Array, right: Array) -> Array:
        """Return the product."""
        return left * right

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first one times the second one."""
        return right / left

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first one times the inverse of the second one."""
        return left / right

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return the square."""
        return factor**2

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the sizes of the entries, or, for sign -1, their inverses."""
        return np.abs(factor) ** sign

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the square, or, for sign -1, of its inverse, (n,)."""
        return np.where(rows == cols, factor[rows] ** (2 * sign), 0.0)

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return the diagonal of -C^T H C."""
        return -hessian.diagonal() * factor ** (2 * sign)

    def squared(self, curvature: Array) -> Array:
        """Return the square."""
        return curvature * curvature

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the square root; None where an entry is not positive, and more than what rounding leaves."""
        if not np.isfinite(curvature).all() or np.any(curvature <= ROUNDING * relative_terms(curvature)):
            return None
        return np.sqrt(curvature)

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return the square root of a positive function; None where that is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.cholesky(function(curvature), reverse=True)

    def half(self, curvature: Array) -> Array:
        """Return half of the diagonal."""
        return 0.5 * curvature

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the inverse of the factor times the curvature."""
        return curvature / factor

    def outer(self, left: Array, right: Array) -> Array:
        """Return the diagonal of the mean of left_b right_b^T."""
        return np.einsum("bi,bi->i", left, right) / len(left)

    def mirrored(self, outer: Array) -> Array:
        """Return the diagonal."""
        return outer

    lower = mirrored

    def times_lower_half(self, factor: Array, left: Array, right: Array) -> Array:
        """Return the factor times half of the diagonal of the mean of left_b right_b^T."""
        return 0.5 * factor * self.outer(left, right)
