"""Gaussians: a mean and a factor of the covariance or of the precision, whatever structure the factor has."""

import functools

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Never, Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.stored import entry_of, stored, with_tag
from pymc_ngvi.core.types import AnyArray, Array, Indices, MeanHessian, Outer
from pymc_ngvi.families.family import (
    ALL_GAUSSIAN,
    GAUSS_NEWTON,
    NO_IVON,
    NO_OTHER_FACTOR,
    OF_COVARIANCE,
    Family,
    Product,
    Traits,
)

# --- structures of matrices: diagonal and dense ones; coordinates in blocks that are independent given the others ---


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

    labels: Indices

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
    def locals_(self) -> Indices:
        """Local coordinates, ascending."""
        return np.flatnonzero(self.labels >= 0)

    @functools.cached_property
    def border(self) -> Indices:
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
    def sizes(self) -> Indices:
        """Of the blocks, ascending."""
        return _read_only(np.sort(np.unique(self.labels[self.locals_], return_counts=True)[1]))

    @functools.cached_property
    def order(self) -> Indices:
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

    def in_blocks(self, rows: Indices, cols: Indices) -> Indices:
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


@dataclass(frozen=True, eq=False)  # or others, which have arrays, would be equal to each other
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

    def covariances(self, factor: Array, sign: int, rows: Indices, cols: Indices) -> Array:
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

    def covariances(self, factor: Array, sign: int, rows: Indices, cols: Indices) -> Array:
        """Return entries of the square, or, for sign -1, of its inverse, (n,)."""
        return np.where(rows == cols, factor[rows] ** (2 * sign), 0.0)

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return the diagonal of -C^T H C."""
        return -hessian.diagonal() * factor ** (2 * sign)

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the square root; None where an entry is not positive, and more than what rounding leaves."""
        if not np.isfinite(curvature).all() or np.any(curvature <= linalg.ROUNDING * linalg.relative_terms(curvature)):
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


# --- gaussians with a factor of any of these structures ---

#: The tag of the class among the arrays of a Gaussian.
TAG = "of"


@dataclass(frozen=True, eq=False)
class Gaussian[S: Structure]:
    """N(mean, C C^T), held by a lower-triangular factor F of the covariance, C = F, or of the precision, C = F^-T.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        With a positive diagonal, as its structure holds it.
    structure : Structure
        Of the factor. A curvature is a symmetric matrix of the same structure.
    """

    location: Array
    factor: Array
    structure: S

    #: 1 where F is a factor of the covariance, -1 of the precision.
    factor_sign: ClassVar[int] = 1
    #: The factor among the arrays of a state.
    factor_name: ClassVar[str]
    #: The class of structures.
    form: ClassVar[Any]
    #: Whether the Fisher information is the curvature of the ELBO at the optimum for every Gaussian target.
    exact_metric: ClassVar[bool]
    n_uniform: ClassVar[int] = 0

    @classmethod
    def of_scale(cls, structure: S, location: Array, scale: Array) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        entries = np.asarray(scale, dtype=np.float64) ** cls.factor_sign
        return cls(np.array(location, dtype=np.float64), structure.from_diagonal(entries), structure)

    def params(self) -> dict[str, Array]:
        """Return the mean and the factor, by name."""
        return {"mean": self.location, self.factor_name: self.factor}

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of the same structure with another mean and factor."""
        return type(self)(params["mean"], params[self.factor_name], self.structure)

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep: mean and factor, and what makes the structure."""
        return {**self.params(), **self.structure.arrays()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the state of these arrays: the inverse of `arrays`; raise ValueError where they make no structure."""
        return cls(arrays["mean"], arrays[cls.factor_name], cls.form.of_arrays(arrays))

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return len(self.location)

    @property
    def n_params(self) -> int:
        """Numbers in the mean and in the factor."""
        return self.n_dim + self.structure.n_lower(self.n_dim)

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        return self.location + self.unwhiten(base)

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = self._whitener(theta - self.location, inverse=True)
        return -0.5 * np.sum(z * z, axis=-1) - self._log_det() - 0.5 * self.n_dim * LOG_2PI

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return self._log_det() + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def mean(self) -> Array:
        """Return a copy of the mean."""
        return self.location.copy()

    def sd(self) -> Array:
        """Return the standard deviations."""
        return self.structure.sd(self.factor, self.factor_sign)

    def cov(self) -> Array:
        """Return the covariance, dense."""
        if self.factor_sign > 0:
            return self.structure.dense(self.structure.gram(self.factor))
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)), without that of the others."""
        unit = np.zeros((len(index), self.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        roots = self.whiten(unit)
        return roots @ roots.T

    def covariances(self, rows: Indices, cols: Indices) -> Array:
        """Return entries of the covariance, (n,)."""
        return self.structure.covariances(self.factor, self.factor_sign, rows, cols)

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""
        return self.unwhiten(self.whiten(vectors))

    # --- between the space of theta and the whitened one; vectors are (..., n_dim) ---

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient."""
        return self._whitener(grad, transposed=True)

    def unwhiten(self, step: Array) -> Array:
        """Return C times each whitened step."""
        return self._whitener(step)

    def dewhiten(self, grad: Array) -> Array:
        """Return C^-T times each whitened gradient."""
        return self._whitener(grad, inverse=True, transposed=True)

    def _whitener(self, vectors: Array, *, inverse: bool = False, transposed: bool = False) -> Array:
        """Return C times vectors, or its inverse, transpose or inverse transpose."""
        of_covariance = self.factor_sign > 0
        operation = self.structure.solve if inverse == of_covariance else self.structure.times
        return operation(self.factor, vectors, transposed=transposed == of_covariance)

    # --- curvatures ---

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return A = -C^T H C, with H the mean Hessian."""
        return self.structure.curvature(self.factor, self.factor_sign, hessian)

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        return curvature.reshape(-1)[self.structure.on_diagonal(curvature)]

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return self.plus_diagonal(curvature.copy(), value)

    def plus_diagonal(self, matrix: Array, value: float | Array) -> Array:
        """Add to a matrix in place."""
        matrix.reshape(-1)[self.structure.on_diagonal(matrix)] += value
        return matrix

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature.reshape(-1)

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector.reshape(self.factor.shape)

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, as `flat` returns them, or of two natural gradients."""
        return float(first @ second)

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix with the lower triangle of ``outer``."""
        mean = self.structure.mirrored(self.structure.outer(outer.left, outer.right))
        return self.plus_diagonal(mean, outer.diagonal)

    # --- steps ---

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of covariance C M^-1 C^T, and C M^-1 grad; None where M is not positive definite."""
        return self._precision_scaled_by(self.structure.cholesky(matrix, reverse=self.factor_sign > 0), grad)

    def precision_scaled_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `precision_scaled_by`, by a positive function of the eigenvalues of ``curvature``.

        None where that is not finite, where values are so far apart that rounding hides the small ones, and where the
        structure is not closed under it.
        """
        if self.factor_sign < 0 or not np.isfinite(curvature).all():
            return None
        return self._precision_scaled_by(self.structure.cholesky_of_function(curvature, function), grad)

    def _precision_scaled_by(self, root: Array | None, grad: Array) -> tuple[Self, Array] | None:
        """Multiply by M = L^T L, or L L^T for a factor of the precision: F' = F L^-1, or F L."""
        if root is None:
            return None
        of_covariance, structure = self.factor_sign > 0, self.structure
        with np.errstate(over="ignore", invalid="ignore"):  # beyond what numbers can hold: no state then
            factor = (structure.right_quotient if of_covariance else structure.product)(self.factor, root)
        if not ((self.curvature_diagonal(factor) > 0.0).all() and linalg.all_finite(factor)):
            return None
        new = type(self)(self.location, factor, structure)
        return new, new.unwhiten(structure.solve(root, grad, transposed=of_covariance))

    # --- beside others of the same structure ---

    def with_scale(self, location: Array, scale: Array) -> Self:
        """Return the state of the same structure with uncorrelated coordinates of standard deviations ``scale``."""
        return self.of_scale(self.structure, location, scale)

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            apart = other._whitener(self.location - other.location, inverse=True)
            square = float(np.sum(self._relative(other) ** 2)) + float(apart @ apart)
            value = 0.5 * (square - self.n_dim) + other._log_det() - self._log_det()
        return value if np.isfinite(value) else np.inf

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        return self.dewhiten(self._whitener(vectors, inverse=True))

    def whitened_precision(self, other: Self) -> Array:
        """Return C^T S C for the precision S of another state."""
        return self.structure.gram(self._relative(other), transposed=self.factor_sign > 0)

    # --- pieces ---

    def _log_det(self) -> float:
        """Return the log determinant of C."""
        return self.factor_sign * float(np.sum(np.log(np.abs(self.curvature_diagonal(self.factor)))))

    def _relative(self, other: Self) -> Array:
        """Return the factor R of the other precision, whitened: R^T R, or R R^T for factors of precisions."""
        pair = (other.factor, self.factor) if self.factor_sign > 0 else (self.factor, other.factor)
        return self.structure.left_quotient(*pair)


#: One of any structure.
type AnyGaussian = Gaussian[Any]


def with_tag_of(gaussian: AnyGaussian) -> dict[str, AnyArray]:
    """Return what files keep of a Gaussian inside something else: its arrays, and the tag of its class."""
    entry = entry_of(type(gaussian))
    assert entry is not None
    return {**gaussian.arrays(), TAG: np.array(entry.tag)}


def of_tag(arrays: dict[str, AnyArray]) -> Any:
    """Return the Gaussian of these arrays: the inverse of `with_tag_of`; raise ValueError where the tag is of none."""
    entry = with_tag(str(arrays[TAG]))
    if entry is None or not issubclass(entry.cls, Gaussian):
        raise ValueError(f"No Gaussian has the tag {arrays[TAG]}.")
    return entry.cls.of_arrays(arrays)


class Unstructured[S: Structure](Gaussian[S]):
    """A Gaussian whose structure follows from the number of coordinates: a class makes states by itself."""

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return cls.of_scale(cls.form(), location, scale)

    @classmethod
    def memory_bytes(cls, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return int(cls.form().memory_bytes(n_dim))


class GaussianFamily[Q: Gaussian[Any]](Family[Q]):
    """The Gaussians of one class and structure."""

    state: type[Q]
    structure: Any

    def from_scale(self, location: Array, scale: Array) -> Q:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return self.state.of_scale(self.structure, location, scale)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return int(self.structure.memory_bytes(n_dim))


# --- gaussian whose precision is low-rank plus diagonal: what the Gaussian of a fit in the space of rows is in theta
# ---


@stored("gaussian.lowrank", content=("location", "factor", "axes", "core"))
@dataclass(frozen=True, eq=False)
class LowRankState(Gaussian[Diagonal]):
    """N(mean, S^-1) with S = D^1/2 (I + P K P^T) D^1/2, whitened by D^-1/2 (I + P K P^T)^-1/2; no steps go here.

    Parameters
    ----------
    location, factor : ndarray, shape (n_dim,)
        Mean, unconstrained; D^1/2.
    axes, core : ndarray, shapes (n_dim, k), (k, k)
        P, whose columns are orthonormal; K, symmetric, of either sign.
    """

    structure: Diagonal = field(default=Diagonal(), init=False, repr=False)
    axes: Array
    core: Array

    exact_metric = True
    factor_sign, factor_name = -1, "root_of_diagonal"

    def params(self) -> dict[str, Array]:
        """Return mean, D^1/2, axes and core, by name."""
        return {**super().params(), "axes": self.axes, "core": self.core}

    @classmethod
    def of_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Return the state of these arrays: the inverse of `params`."""
        return cls(arrays["mean"], arrays[cls.factor_name], arrays["axes"], arrays["core"])

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of other arrays."""
        return self.of_arrays(params)

    @functools.cached_property
    def _roots(self) -> tuple[Array, Array]:
        """(I + K)^-1/2 and its inverse."""
        values, vectors = np.linalg.eigh(self.core)
        root, inverse = ((vectors * (1.0 + values) ** power) @ vectors.T for power in (-0.5, 0.5))
        return root, inverse

    def _stretched(self, vectors: Array, inverse: bool) -> Array:
        return vectors + (vectors @ self.axes) @ (self._roots[inverse] - np.eye(len(self.core))) @ self.axes.T

    def _whitener(self, vectors: Array, *, inverse: bool = False, transposed: bool = False) -> Array:
        if inverse == transposed:
            return super()._whitener(self._stretched(vectors, inverse), inverse=inverse)
        return self._stretched(super()._whitener(vectors, inverse=inverse), inverse)

    def _log_det(self) -> float:
        return float(np.linalg.slogdet(self._roots[0])[1] - np.sum(np.log(self.factor)))

    def sd(self) -> Array:
        """Return the standard deviations."""
        p, root = self.axes, self._roots[0]
        return np.sqrt(1.0 + np.sum((p @ (root @ root - np.eye(len(root)))) * p, axis=1)) / self.factor

    def covariances(self, rows: Indices, cols: Indices) -> Array:
        """Return entries of the covariance, (n,)."""
        p, root = self.axes, self._roots[0]
        within = np.einsum("nk,nk->n", (p @ (root @ root - np.eye(len(root))))[rows], p[cols])
        return np.asarray((within + (rows == cols)) / (self.factor[rows] * self.factor[cols]))

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        raise NotImplementedError("a low-rank Gaussian is no diagonal one: this is not known of it")

    divergence = whitened_precision = outer_mean = curvature = add_to_diagonal = _refuse
    curvature_diagonal = flat = unflat = precision_scaled_by = _refuse


# --- gaussian with a dense covariance, held by the Cholesky factor of the covariance or of the precision ---


@stored("gaussian.full", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullState(Unstructured[Dense]):
    """N(mean, C C^T) with a lower-triangular C.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        C, lower triangular, positive diagonal. The precision is C^-T C^-1; it is never formed.
    """

    structure: Dense = field(default=Dense(), repr=False)

    form = Dense
    factor_name = "cholesky_factor"
    exact_metric = True

    @property
    def root(self) -> Array:
        """The factor of the covariance."""
        return self.factor


@stored("gaussian.full_precision", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullPrecisionState(Unstructured[Dense]):
    """N(mean, (T T^T)^-1) with a lower-triangular T; the whitener is T^-T.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        T, lower triangular, positive diagonal.
    """

    structure: Dense = field(default=Dense(), repr=False)

    form = Dense
    factor_sign = -1
    factor_name = "precision_cholesky_factor"
    exact_metric = True


@dataclass(frozen=True)
class FullFamily(GaussianFamily[FullState | FullPrecisionState]):
    """All Gaussians.

    Parameters
    ----------
    state : type
        By the factor of the covariance, or of the precision.
    """

    state: type[FullState] | type[FullPrecisionState] = FullState
    structure: Dense = FullState.structure

    traits: ClassVar = Traits(
        name="full",
        also_called="fullrank fullrankadvi mvn mvnormal multivariatenormal gaussian normal dense laplace unstructured",
        states=(FullState, FullPrecisionState, LowRankState),
        goes_with=(*ALL_GAUSSIAN, GAUSS_NEWTON),
        refuses=(NO_IVON,),
        factors=("covariance", "precision"),
    )

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family with the factor that the options ask for."""
        return cls(FullPrecisionState if options.factor == "precision" else FullState)


# --- gaussian with independent coordinates ---


@stored("gaussian.diagonal", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class DiagonalState(Unstructured[Diagonal]):
    """N(mean, diag(scale^2)); a curvature is the diagonal of A, (n_dim,), a factor the scales.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim,)
        Standard deviations, positive.
    """

    structure: Diagonal = field(default=Diagonal(), repr=False)

    #: The standard deviations by another name: only Gaussians with independent coordinates have it; see `Independent`.
    scale = property(lambda self: self.factor)
    form = Diagonal
    factor_name = "sd"
    exact_metric = False


@dataclass(frozen=True)
class DiagonalFamily(GaussianFamily[DiagonalState]):
    """The Gaussians with independent coordinates."""

    state: type[DiagonalState] = DiagonalState
    structure: Diagonal = DiagonalState.structure

    traits: ClassVar = Traits(
        name="diagonal",
        also_called="meanfield mf mfvi advi factorised factorized diag independent",
        states=(DiagonalState,),
        goes_with=(
            *OF_COVARIANCE,
            Product(("natural_pd",), ("stein",), ("ivon",)),
            GAUSS_NEWTON,
            Product(("natural",), ("gauss_newton",), ("ivon",)),
        ),
        refuses=(NO_OTHER_FACTOR,),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family, the same for every model."""
        return cls()


# --- gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c) ---
#
# Blocks are independent of each other; each has a dense covariance, held by its Cholesky factor.
#
# References
# ----------
# .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
# approximation.
#    https://doi.org/10.48550/arXiv.2109.00375


# --- block-diagonal matrices, each held as the blocks, in C order, from the smallest on ---


def _of_each_block(name: str) -> Any:
    """Return what `Dense` makes of matrices, and of vectors as rows, of all blocks of one size at a time."""
    operation = getattr(Dense(), name)

    def of_blocks(self: "BlockStructure", *given: Array, **options: Any) -> Any:
        parts = [self.unpack(array) if array.ndim == 1 else self._split(array) for array in given]
        return self.each(functools.partial(operation, **options), *parts)

    return of_blocks


@stored("structure.block")
@dataclass(frozen=True, eq=False)
class BlockStructure(Partition, Structure):
    """A partition of the coordinates into blocks that are independent of each other.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block.

    Raises
    ------
    ValueError
        If there are no labels, or not one for each coordinate.
    """

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        object.__setattr__(self, "labels", labels - labels.min(initial=0))  # the border is a block, too
        super().__post_init__()
        if not len(self.labels):
            raise ValueError("There should be labels of blocks for one coordinate at least; got none.")

    # --- form ---

    @functools.cached_property
    def rows(self) -> Indices:
        """Of each entry: the coordinate of its row."""
        return self.each(lambda own: np.repeat(own.mT, own.shape[2], axis=2), self._by_size(self.order[None]))

    @functools.cached_property
    def columns(self) -> Any:
        """Of each entry: the coordinate of its column."""
        return self.each(lambda own: np.repeat(own, own.shape[2], axis=1), self._by_size(self.order[None]))

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return (len(self.rows) + n_dim) // 2

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 factors."""
        return PER_ENTRY * len(self.rows) + PER_COORDINATE * n_dim

    @functools.cached_property
    def _diagonal(self) -> Indices:
        every = np.arange(self.n_dim)
        return self.in_blocks(every, every)

    def on_diagonal(self, matrix: Array) -> Indices:
        """Return where the array has the diagonal."""
        return self._diagonal

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""
        return np.where(self.rows == self.columns, entries[self.rows], 0.0)

    def dense(self, curvature: Array) -> Array:
        """Return a matrix as (n_dim, n_dim)."""
        result = np.zeros((self.n_dim, self.n_dim))
        result[self.rows, self.columns] = curvature
        return result

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices."""
        return {"labels": self.labels}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays."""
        return cls(arrays["labels"])

    # --- by size ---

    def unpack(self, packed: Array) -> list[Array]:
        """Return the blocks by size, (n_blocks, k, k), as views."""
        ends = np.cumsum([s.n_blocks * s.size**2 for s in self.stacks])
        parts = zip(np.split(packed, ends[:-1]), self.stacks, strict=True)
        return [part.reshape(s.n_blocks, s.size, s.size) for part, s in parts]

    def each(self, operation: Callable[..., Array | None], *parts: list[Array]) -> Any:
        """Return the matrix of what an operation makes of the blocks of each size; None where it makes nothing."""
        results = [operation(*of_size) for of_size in zip(*parts, strict=True)]
        kept = [result.ravel() for result in results if result is not None]
        return np.concatenate(kept) if len(kept) == len(results) else None

    def _by_size(self, ordered: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the parts of vectors, (n_vectors, n_dim), in the order of blocks: (n_blocks, n_vectors, k)."""
        return [ordered[:, s.where].reshape(len(ordered), s.n_blocks, s.size).swapaxes(0, 1) for s in self.stacks]

    def _split(self, vectors: Array) -> list[Array]:
        return self._by_size(vectors.reshape(-1, self.n_dim)[:, self.order])

    def _of_vectors(self, operation: Callable[..., Array], factor: Array, vectors: Array, transposed: bool) -> Array:
        result = np.empty((vectors.size // self.n_dim, self.n_dim))
        for stack, *pair in zip(self.stacks, self.unpack(factor), self._split(vectors), strict=True):
            part = operation(*pair, transposed=transposed).swapaxes(0, 1)
            result[:, self.order[stack.where]] = part.reshape(len(result), stack.n_blocks * stack.size)
        return result.reshape(vectors.shape)

    # --- operations ---

    product, left_quotient, right_quotient, gram = map(
        _of_each_block, ("product", "left_quotient", "right_quotient", "gram")
    )
    cholesky, half, lower_solve, lower, mirrored, outer = map(
        _of_each_block, ("cholesky", "half", "lower_solve", "lower", "mirrored", "outer")
    )

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self._of_vectors(Dense().times, factor, vectors, transposed)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self._of_vectors(Dense().solve, factor, vectors, transposed)

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations for a factor of the covariance."""
        result = np.empty(self.n_dim)
        result[self.order] = np.concatenate([Dense().sd(c, sign).ravel() for c in self.unpack(factor)])
        return result

    def covariances(self, factor: Array, sign: int, rows: Indices, cols: Indices) -> Array:
        """Return entries of F F^T, (n,)."""
        inside, result = self.labels[rows] == self.labels[cols], np.zeros(len(rows))
        result[inside] = self.gram(factor)[self.in_blocks(rows[inside], cols[inside])]
        return result

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return L with f(A) = L^T L for a positive function of the eigenvalues, as `Dense` does."""
        return self.each(lambda a: Dense().cholesky_of_function(a, function), self.unpack(curvature))

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return the blocks of -C^T H C for the factor C of a covariance, with H the mean Hessian."""
        # Of a direction that lies in one block, only what its product has in that block is kept.
        place = np.argsort(self.order)[self.rows]
        lines = self.each(lambda c: c.mT, self.unpack(factor))
        products = np.empty_like(factor)
        step = max(1, AT_ONCE // self.n_dim)
        for start in range(0, self.n_dim, step):
            stop = min(start + step, self.n_dim)
            part = slice(*np.searchsorted(place, (start, stop)))
            at = (place[part] - start, self.columns[part])
            directions = np.zeros((stop - start, self.n_dim))
            directions[at] = lines[part]
            products[part] = hessian.products(directions)[at]
        with np.errstate(invalid="ignore"):  # inf times the zeros of the factor: the caller sees what is not finite
            return self.each(lambda p, c: linalg.symmetrise(-(p @ c)), self.unpack(products), self.unpack(factor))


# --- gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c) ---


@stored("gaussian.block")
@dataclass(frozen=True, eq=False)
class BlockState(Gaussian[BlockStructure]):
    """N(mean, C C^T) with a block-diagonal C; a curvature is packed as C is, its blocks symmetric.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        The blocks of C, lower triangular with a positive diagonal, packed as ``structure`` says.
    structure : BlockStructure
    """

    form = BlockStructure
    factor_name = "cholesky_blocks"
    exact_metric = False


@stored("family.block", content=("structure",))
@dataclass(frozen=True)
class BlockFamily(GaussianFamily[BlockState]):
    """The Gaussians whose covariance has these blocks.

    Parameters
    ----------
    structure : BlockStructure
    """

    structure: BlockStructure
    state: type[BlockState] = BlockState

    traits: ClassVar = Traits(
        name="block",
        also_called="blockdiagonal blocks",
        states=(BlockState,),
        goes_with=(*OF_COVARIANCE, GAUSS_NEWTON),
        refuses=(NO_IVON, NO_OTHER_FACTOR),
        options=("blocks",),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family with the blocks that the options name."""
        return cls(BlockStructure(model.labels(options.blocks)))
