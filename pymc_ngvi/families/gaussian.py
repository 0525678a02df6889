"""Gaussians: a mean and a factor of the covariance or of the precision, whatever structure the factor has."""

import functools
import math

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Never, Self

import numpy as np

from scipy import sparse

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.stored import stored
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
        object.__setattr__(self, "labels", labels)

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

    @functools.cached_property
    def sizes(self) -> Indices:
        """Of the blocks, ascending."""
        return np.sort(np.unique(self.labels[self.locals_], return_counts=True)[1])

    @functools.cached_property
    def order(self) -> Indices:
        """Coordinates, (n_dim,): blocks by size, then by first coordinate, ascending in each; then the border."""
        _, first, inverse, counts = np.unique(
            self.labels[self.locals_], return_index=True, return_inverse=True, return_counts=True
        )
        local = np.lexsort((self.locals_, first[inverse], counts[inverse]))
        return np.concatenate([self.locals_[local], self.border])

    @functools.cached_property
    def stacks(self) -> list[tuple[int, int, slice]]:
        """The blocks by size: how many, of which size, and their coordinates in `order`."""
        sizes, counts = np.unique(self.sizes, return_counts=True)
        stop = np.cumsum(sizes * counts)
        return list(zip(counts.tolist(), sizes.tolist(), map(slice, stop - sizes * counts, stop), strict=True))

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


# --- what a structure of matrices can do: the operations that all Gaussians are written with ---

LOG_2PI = float(np.log(2 * np.pi))
#: Bytes of a fit at its peak, beyond the model's own: for each coordinate, and for each entry of a factor that is not
#: on the diagonal: those of the curvature of each of eight replicates, the noise of each, and up to twelve vectors of
#: secant pairs.
PER_COORDINATE, PER_ENTRY = 512, 448


def _of_blocks(operation: Any) -> Callable[..., Any]:
    """Return, of matrices and of vectors as rows, what an operation makes of all blocks of one size at a time.

    None where it makes nothing of some of them.
    """

    @functools.wraps(operation)
    def of_matrices(self: "Structure", *given: Array, **options: Any) -> Array | None:
        if not self.has_blocks:
            return operation(*given, **options)
        results = [operation(*blocks, **options) for blocks in zip(*map(self.split, given), strict=True)]
        there = [result for result in results if result is not None]
        return self.joined(there) if len(there) == len(results) else None

    return of_matrices


def _are_numbers(stack: Array) -> bool:
    """Tell whether blocks have one row: a loop over matrices would take ten times as long as one over numbers."""
    return stack.ndim > 2 and stack.shape[-1] == 1


def _product(left: Array, right: Array) -> Array:
    """Return the product of two matrices."""
    return left * right if _are_numbers(right) else left @ right


def _cholesky(curvature: Array, *, reverse: bool) -> Array | None:
    """Return the factor L with A = L L^T, in reverse L^T L; None where A is not positive definite.

    Its diagonal counts as sums with 1, as those of relative precisions are: see `linalg.relative_terms`.
    """
    terms = linalg.relative_terms(linalg.diagonal(curvature))
    if _are_numbers(curvature):
        there = np.isfinite(curvature).all() and (curvature[..., 0] > linalg.ROUNDING * terms).all()
        return np.sqrt(curvature) if there else None
    if not reverse:
        return linalg.cholesky(curvature, terms)
    upper = linalg.reverse_cholesky(curvature, terms)
    return None if upper is None else upper.mT


def _cholesky_of_function(curvature: Array, *, function: Callable[[Array], Array]) -> Array | None:
    """Return L with f(A) = L^T L for a positive function of the eigenvalues.

    None where that is not finite, or where values are so far apart that rounding hides the small ones.
    """
    eigenvalues, vectors = (curvature, None) if _are_numbers(curvature) else np.linalg.eigh(curvature)
    with np.errstate(all="ignore"):
        values = function(eigenvalues)
    if not (np.isfinite(values) & (values > 0.0)).all():
        return None
    if vectors is None:
        return np.sqrt(values)
    lower = linalg.cholesky_of_product((vectors * np.sqrt(values)[..., None, :])[..., ::-1, :])
    return None if lower is None else np.ascontiguousarray(lower[..., ::-1, ::-1]).mT


def _outer(left: Array, right: Array) -> Array:
    """Return the lower triangle of the mean of left_b right_b^T."""
    n = left.shape[-2]
    if _are_numbers(left):
        return np.einsum("...ni,...ni->...i", left, right)[..., None, :] / n
    return linalg.lower_triangle(left.mT @ (right / n))


def _mirrored(lower: Array) -> Array:
    """Return the symmetric matrix that has this lower triangle."""
    if _are_numbers(lower):
        return lower
    result = lower + lower.mT
    linalg.diagonal(result)[:] = linalg.diagonal(lower)
    return result


@dataclass(frozen=True, eq=False)  # or others, which have arrays, would be equal to each other
class Structure:
    """Matrices with zeros in the same places, each held as one array: here all matrices; others say what they do else.

    A *factor* is lower triangular with a diagonal that is not 0, maybe in another order of the coordinates; with the
    others of its structure it is closed under products and inverses. A *curvature* is symmetric, and can differ from 0
    where a factor or its transpose can. Vectors are rows: (..., n_dim). Operations are those on dense matrices, and on
    the blocks that others consist of.
    """

    #: Of each entry: the coordinate of its column, as an index into (n_dim,) that broadcasts.
    columns: ClassVar[Any] = slice(None)
    #: Whether matrices are held otherwise than as one block.
    has_blocks: ClassVar[bool] = False

    def shape(self, n_dim: int) -> tuple[int, ...]:
        """Return the shape of the array."""
        return n_dim, n_dim

    def on_diagonal(self, n_dim: int) -> Any:
        """Return where the raveled array has the diagonal, in the order of the coordinates."""
        return slice(None, None, n_dim + 1)

    def split(self, array: AnyArray) -> list[AnyArray]:
        """Return a matrix as its blocks, those of each size as a stack; or vectors, (n, n_dim), as their parts there.

        Where there is but one block, the matrix itself, and the vectors.
        """
        return [array]

    def joined(self, blocks: list[AnyArray]) -> AnyArray:
        """Return the matrix of blocks."""
        return blocks[0]

    def whole(self, parts: list[Array]) -> Array:
        """Return the vectors of parts."""
        return parts[0]

    def entries(self, curvature: Array, rows: Indices, cols: Indices) -> Array:
        """Return entries of a symmetric matrix, in the shape of the indices."""
        return curvature[rows, cols]

    # --- what is the same for all ---

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return (math.prod(self.shape(n_dim)) + n_dim) // 2

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return PER_ENTRY * (math.prod(self.shape(n_dim)) - n_dim) + PER_COORDINATE * n_dim

    product, left_quotient = map(_of_blocks, (_product, linalg.solve_lower))
    #: F G^-1.
    right_quotient = _of_blocks(lambda f, g: linalg.solve_lower(g, f.mT, transpose=True).mT)
    #: F F^T, or F^T F.
    gram = _of_blocks(lambda f, *, transposed=False: _product(f.mT, f) if transposed else _product(f, f.mT))
    cholesky, cholesky_of_function = map(_of_blocks, (_cholesky, _cholesky_of_function))
    #: Of a symmetric matrix: the lower triangle with a halved diagonal.
    half = _of_blocks(functools.partial(linalg.lower_triangle, on_diagonal=0.5))
    #: The entries that a factor has of F^-T A.
    lower_solve = _of_blocks(lambda f, a: linalg.lower_triangle(linalg.solve_lower(f, a, transpose=True)))
    outer, mirrored = map(_of_blocks, (_outer, _mirrored))

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        pairs = zip(self.split(factor), self.split(vectors.reshape(-1, vectors.shape[-1])), strict=True)
        return self.whole([_product(x, f if transposed else f.mT) for f, x in pairs]).reshape(vectors.shape)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        pairs = zip(self.split(factor), self.split(vectors.reshape(-1, vectors.shape[-1])), strict=True)
        parts = [linalg.solve_lower(f, x.mT, transpose=transposed).mT for f, x in pairs]
        return self.whole(parts).reshape(vectors.shape)


#: All matrices.
Dense = Structure


@dataclass(frozen=True)
class Diagonal(Structure):
    """Diagonal matrices, each held as its diagonal, (n_dim,): blocks are numbers."""

    has_blocks = True

    def shape(self, n_dim: int) -> tuple[int, ...]:
        """Return the shape of the array."""
        return (n_dim,)

    def on_diagonal(self, n_dim: int) -> slice:
        """Return where the array has the diagonal: everywhere."""
        return slice(None)

    def split(self, array: AnyArray) -> list[AnyArray]:
        """Return a matrix as a stack of numbers, (n_dim, 1, 1); vectors as (n_dim, n, 1)."""
        return [array.T[..., None] if array.ndim > 1 else array[:, None, None]]

    def joined(self, blocks: list[AnyArray]) -> AnyArray:
        """Return the diagonal."""
        return blocks[0].reshape(-1)

    def whole(self, parts: list[Array]) -> Array:
        """Return the vectors of parts."""
        return parts[0][:, :, 0].T

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the matrix times each vector."""
        return vectors * factor

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse times each vector."""
        return vectors / factor

    def entries(self, curvature: Array, rows: Indices, cols: Indices) -> Array:
        """Return entries of a matrix, in the shape of the indices."""
        return np.where(rows == cols, curvature[rows], 0.0)


# --- gaussians with a factor of any of these structures ---


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
    def from_scale(cls, location: Array, scale: Array, structure: S | None = None) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,).

        Without a structure where that follows from the number of coordinates.
        """
        structure = cls.form() if structure is None else structure
        factor = np.zeros(structure.shape(len(location)))
        factor.reshape(-1)[structure.on_diagonal(len(location))] = np.asarray(scale, np.float64) ** cls.factor_sign
        return cls(np.array(location, dtype=np.float64), factor, structure)

    @classmethod
    def memory_bytes(cls, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak, without a structure."""
        return int(cls.form().memory_bytes(n_dim))

    def params(self) -> dict[str, Array]:
        """Return the mean and the factor, by name."""
        return {"mean": self.location, self.factor_name: self.factor}

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of the same structure with another mean and factor."""
        return type(self)(params["mean"], params[self.factor_name], self.structure)

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
        structure = self.structure
        squares = [np.einsum("...ij,...ij->...i", c, c)[..., None, :] for c in structure.split(self._root())]
        return np.sqrt(structure.whole(squares)[0])

    def cov(self) -> Array:
        """Return the covariance, dense."""
        if self.factor_sign > 0:
            shape, gram = (self.n_dim, self.n_dim), self.structure.gram(self.factor)
            return gram if gram.shape == shape else self.structure.entries(gram, *np.indices(shape))
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)), without that of the others."""
        unit = np.zeros((len(index), self.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        roots = self.whiten(unit)
        return roots @ roots.T

    def covariances(self, rows: Indices, cols: Indices) -> Array:
        """Return entries of the covariance, (n,)."""
        if rows is cols or np.array_equal(rows, cols):
            return self.sd()[rows] ** 2
        return self.structure.entries(self.structure.gram(self._root()), rows, cols)

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
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            root = self._root()
            return linalg.symmetrise(-(hessian.products(np.ascontiguousarray(root.T)) @ root))

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        return curvature.reshape(-1)[self.structure.on_diagonal(self.n_dim)]

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return self.plus_diagonal(curvature.copy(), value)

    def plus_diagonal(self, matrix: Array, value: float | Array) -> Array:
        """Add to a matrix in place."""
        matrix.reshape(-1)[self.structure.on_diagonal(self.n_dim)] += value
        return matrix

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, raveled, or of two natural gradients."""
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
        return self._precision_scaled_by(self.structure.cholesky_of_function(curvature, function=function), grad)

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
        return self.from_scale(location, scale, self.structure)

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            apart = other._whitener(self.location - other.location, inverse=True)
            value = 0.5 * (self._trace(other) + float(apart @ apart) - self.n_dim) + other._log_det() - self._log_det()
        return value if np.isfinite(value) else np.inf

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        return self.dewhiten(self._whitener(vectors, inverse=True))

    def whitened_precision(self, other: Self) -> Array:
        """Return C^T S C for the precision S of another state."""
        return self.structure.gram(self._relative(other), transposed=self.factor_sign > 0)

    # --- pieces ---

    def _root(self) -> Array:
        """Return C, as its structure holds it."""
        return self.factor if self.factor_sign > 0 else self.unwhiten(np.eye(self.n_dim)).T

    def _log_det(self) -> float:
        """Return the log determinant of C."""
        return self.factor_sign * float(np.sum(np.log(np.abs(self.curvature_diagonal(self.factor)))))

    def _trace(self, other: Self) -> float:
        """Return the trace of C^T S C for the precision S of another state."""
        return float(np.sum(self._relative(other) ** 2))

    def _relative(self, other: Self) -> Array:
        """Return the factor R of the other precision, whitened: R^T R, or R R^T for factors of precisions."""
        pair = (other.factor, self.factor) if self.factor_sign > 0 else (self.factor, other.factor)
        return self.structure.left_quotient(*pair)


#: One of any structure.
type AnyGaussian = Gaussian[Any]


class GaussianFamily[Q: Gaussian[Any]](Family[Q]):
    """The Gaussians of one class and structure."""

    state: type[Q]
    structure: Any

    def from_scale(self, location: Array, scale: Array) -> Q:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return self.state.from_scale(location, scale, self.structure)

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

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of other arrays."""
        return type(self)(params["mean"], params[self.factor_name], params["axes"], params["core"])

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
    curvature_diagonal = precision_scaled_by = _refuse


# --- gaussian with a dense covariance, held by the Cholesky factor of the covariance or of the precision ---


@stored("gaussian.full", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullState(Gaussian[Dense]):
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

    #: The factor by another name: only Gaussians with a dense one of the covariance have it.
    root = property(lambda self: self.factor)


@stored("gaussian.full_precision", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullPrecisionState(Gaussian[Dense]):
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
class DiagonalState(Gaussian[Diagonal]):
    """N(mean, diag(scale^2)); a curvature is the diagonal of A, (n_dim,), a factor the scales.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim,)
        Standard deviations, positive.
    """

    structure: Diagonal = field(default=Diagonal(), repr=False)

    #: The standard deviations by another name: only Gaussians with independent coordinates have it.
    scale = property(lambda self: self.factor)
    form = Diagonal
    factor_name = "sd"
    exact_metric = False

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the diagonal of A."""
        return -hessian.diagonal() * self.factor**2


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

    has_blocks = True

    @functools.cached_property
    def rows(self) -> Indices:
        """Of each entry: the coordinate of its row."""
        return self.joined([np.repeat(own.mT, own.shape[2], axis=2) for own in self.split(np.arange(self.n_dim)[None])])

    @functools.cached_property
    def columns(self) -> Any:
        """Of each entry: the coordinate of its column."""
        return self.joined([np.repeat(own, own.shape[2], axis=1) for own in self.split(np.arange(self.n_dim)[None])])

    def shape(self, n_dim: int) -> tuple[int, ...]:
        """Return the shape of the array."""
        return self.rows.shape

    @functools.cached_property
    def _diagonal(self) -> Indices:
        every = np.arange(self.n_dim)
        return self.in_blocks(every, every)

    def on_diagonal(self, n_dim: int) -> Indices:
        """Return where the array has the diagonal."""
        return self._diagonal

    def entries(self, curvature: Array, rows: Indices, cols: Indices) -> Array:
        """Return entries of a symmetric matrix, in the shape of the indices."""
        inside, result = self.labels[rows] == self.labels[cols], np.zeros(rows.shape)
        result[inside] = curvature[self.in_blocks(rows[inside], cols[inside])]
        return result

    # --- by size ---

    def split(self, array: AnyArray) -> list[AnyArray]:
        """Return the blocks by size, (n_blocks, k, k), as views; of vectors, (n, n_dim), the parts (n_blocks, n, k)."""
        if array.ndim > 1:
            ordered = array[:, self.order]
            return [ordered[:, where].reshape(-1, n, size).swapaxes(0, 1) for n, size, where in self.stacks]
        ends = np.cumsum([n * size**2 for n, size, _ in self.stacks])
        parts = zip(np.split(array, ends[:-1]), self.stacks, strict=True)
        return [part.reshape(n, size, size) for part, (n, size, _) in parts]

    def joined(self, blocks: list[AnyArray]) -> AnyArray:
        """Return the matrix of blocks."""
        return np.concatenate([part.ravel() for part in blocks])

    def whole(self, parts: list[Array]) -> Array:
        """Return the vectors of parts."""
        result = np.empty((parts[0].shape[1], self.n_dim))
        for (n, size, where), part in zip(self.stacks, parts, strict=True):
            result[:, self.order[where]] = part.swapaxes(0, 1).reshape(len(result), n * size)
        return result


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

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the blocks of -C^T H C for the factor C of a covariance, with H the mean Hessian."""
        structure, factor = self.structure, self.factor
        # Of a direction that lies in one block, only what its product has in that block is kept.
        place = np.argsort(structure.order)[structure.rows]
        blocks = structure.split(factor)
        lines = structure.joined([c.mT for c in blocks])
        products = np.empty_like(factor)
        step = max(1, AT_ONCE // structure.n_dim)
        for start in range(0, structure.n_dim, step):
            stop = min(start + step, structure.n_dim)
            part = slice(*np.searchsorted(place, (start, stop)))
            at = (place[part] - start, structure.columns[part])
            directions = np.zeros((stop - start, structure.n_dim))
            directions[at] = lines[part]
            products[part] = hessian.products(directions)[at]
        with np.errstate(invalid="ignore"):  # inf times the zeros of the factor: the caller sees what is not finite
            return structure.joined(
                [linalg.symmetrise(-(p @ c)) for p, c in zip(structure.split(products), blocks, strict=True)]
            )


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
