"""Arrow matrices: block-diagonal but for a border that all blocks may touch, in packed form.

With the border last, lower-triangular arrow matrices are closed under products and inverses, and so is a congruence by
one of a symmetric arrow matrix: no operation fills in more entries, and none loops over blocks.

An arrow matrix, blocks dense and border last, leaves out no entry that its factor would fill in, so the Gaussian of
given covariances in its entries, of largest entropy, has a closed form [1]_: that of the border, and the regressions of
each block on it.

References
----------
.. [1] S. L. Lauritzen (1996). Graphical Models. Oxford University Press, section 5.3.
"""

import functools

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.matrices import stacks
from pymc_ngvi.families.matrices.structure import Structure

# --- which coordinates are in a border, and the blocks of the others; matrices of that form as vectors ---
#
# Coordinates are *local*, in blocks that touch each other in no entry, or in the *border*, which all blocks may touch
# and which comes last. Blocks of one size are stacked, so that every operation is a batched one.
#
# A packed matrix is a vector: the blocks, each in C order, stack after stack from the smallest size on; then the rows
# of the local coordinates in the columns of the border, (n_local, n_border), which stand for both triangles of a
# symmetric matrix and for the lower one of a triangular matrix; then the corner, (n_border, n_border).


class Stack(NamedTuple):
    """All blocks of one size."""

    n_blocks: int
    size: int
    #: Its coordinates in `Packing.order`.
    where: slice
    #: Its entries in a packed matrix.
    entries: slice


class Parts(NamedTuple):
    """A packed matrix as arrays."""

    #: shape (n_blocks, k, k) for each size k.
    blocks: list[Array]
    #: Rows in the order of the blocks; shape (n_local, n_border).
    border: Array
    #: shape (n_border, n_border).
    corner: Array


@dataclass(frozen=True, eq=False)
class Packing:
    """A partition of the coordinates.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block; -1 in the border.

    Raises
    ------
    ValueError
        If labels are not (n_dim,).
    """

    labels: NDArray[np.intp]

    def __post_init__(self) -> None:
        labels = np.array(self.labels, dtype=np.intp)
        if labels.ndim != 1:
            raise ValueError(f"Labels of blocks should be (n_dim,); got shape {labels.shape}.")
        object.__setattr__(self, "labels", _read_only(labels))

    @classmethod
    def from_arrays(cls, order: ArrayLike, sizes: ArrayLike) -> Self:
        """Return the structure with these `order` and `sizes`, of any numeric type.

        Raises
        ------
        ValueError
            If ``order`` is no permutation, or ``sizes`` are not positive or add up to more than its length.
        """
        order, sizes = np.asarray(order).astype(np.intp), np.asarray(sizes).astype(np.intp)
        n_dim, n_local = len(order), int(sizes.sum())
        if not np.array_equal(np.sort(order), np.arange(n_dim)):
            raise ValueError(
                f"The order of {n_dim} coordinates should be a permutation of 0..{n_dim - 1}; got {order}."
            )
        if sizes.min(initial=1) < 1 or n_local > n_dim:
            raise ValueError(f"The sizes of blocks should be positive and add up to {n_dim} at most; got {sizes}.")
        labels = np.full(n_dim, -1, dtype=np.intp)
        labels[order[:n_local]] = np.repeat(np.arange(len(sizes)), sizes)
        return cls(labels)

    # --- coordinates ---

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

    @functools.cached_property
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
    def place(self) -> NDArray[np.intp]:
        """Of each coordinate: where it is in `order`."""
        return np.argsort(self.order)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks by size."""
        stacks, start, entry = [], 0, 0
        for size, n_blocks in zip(*(a.tolist() for a in np.unique(self.sizes, return_counts=True)), strict=True):
            stop, last = start + n_blocks * size, entry + n_blocks * size**2
            stacks.append(Stack(n_blocks, size, slice(start, stop), slice(entry, last)))
            start, entry = stop, last
        return tuple(stacks)

    # --- matrices ---

    @functools.cached_property
    def n_in_blocks(self) -> int:
        """Entries of the blocks."""
        return int(np.sum(self.sizes**2))

    @property
    def n_entries(self) -> int:
        """Length of a packed matrix."""
        return self.n_in_blocks + (self.n_local + self.n_border) * self.n_border

    def unpack(self, packed: Array) -> Parts:
        """Return the parts of a packed matrix, as views."""
        g, start = self.n_border, self.n_in_blocks
        blocks = [packed[s.entries].reshape(s.n_blocks, s.size, s.size) for s in self.stacks]
        stop = start + self.n_local * g
        return Parts(blocks, packed[start:stop].reshape(self.n_local, g), packed[stop:].reshape(g, g))

    def pack(self, parts: Parts) -> Array:
        """Return the packed matrix with these parts: the inverse of `unpack`."""
        return np.concatenate([*(b.ravel() for b in parts.blocks), parts.border.ravel(), parts.corner.ravel()])

    @functools.cached_property
    def _entries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of each entry of a packed lower-triangular matrix: the places in `order` of its row and its column."""
        local, rows, cols = np.arange(self.n_local), [], []
        last = np.arange(self.n_local, self.n_dim)
        for stack in self.stacks:
            lines = local[stack.where].reshape(stack.n_blocks, stack.size)
            rows.append(np.repeat(lines, stack.size))
            cols.append(np.repeat(lines[:, None, :], stack.size, axis=1).ravel())
        rows += [np.tile(last, self.n_local), np.repeat(last, self.n_border)]
        cols += [np.repeat(local, self.n_border), np.tile(last, self.n_border)]
        return np.concatenate(rows), np.concatenate(cols)

    @property
    def lines(self) -> NDArray[np.intp]:
        """Of each entry of a packed lower-triangular matrix: the place of its row in `order`."""
        return self._entries[0]

    @functools.cached_property
    def columns(self) -> NDArray[np.intp]:
        """Of each entry of a packed lower-triangular matrix: the coordinate of its column."""
        return self.order[self._entries[1]]

    @functools.cached_property
    def diagonal(self) -> NDArray[np.intp]:
        """Of each coordinate: the place of its diagonal entry in a packed matrix."""
        rows, cols = self._entries
        return np.flatnonzero(rows == cols)[self.place]

    @property
    def in_border(self) -> slice:
        """Entries of a packed matrix that stand for two of a symmetric one."""
        return slice(self.n_in_blocks, self.n_in_blocks + self.n_local * self.n_border)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Entries of a symmetric matrix with this structure."""
        rows, cols = self._entries
        i, j = self.order[rows[rows >= cols]], self.order[cols[rows >= cols]]
        codes = np.sort(np.maximum(i, j) * self.n_dim + np.minimum(i, j))
        return Pattern(codes // self.n_dim, codes % self.n_dim, self.n_dim)

    def in_blocks(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where entries are in the packed blocks; rows and columns are places of local coordinates in `order`.

        Raises
        ------
        ValueError
            If one is between two blocks.
        """
        sizes = np.repeat(self.sizes, self.sizes)
        firsts = np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        if not np.array_equal(firsts[rows], firsts[cols]):
            raise ValueError("The pattern has an entry between two blocks of the structure.")
        return (np.cumsum(sizes) - sizes)[rows] + cols - firsts[rows]

    def from_values(self, pattern: Pattern, values: Array) -> Array:
        """Return the packed symmetric matrix with these values in the entries of a pattern.

        Raises
        ------
        ValueError
            If the pattern has an entry between two blocks.
        """
        places, sources = _places(self, pattern)
        packed = np.zeros(self.n_entries)
        packed[places] = values[sources]
        return packed

    def entries(self, packed: Array, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> tuple[Array, NDArray[np.bool_]]:
        """Return entries of a packed symmetric matrix, (n,), 0 between two blocks, and which are there."""
        n, g, start = self.n_local, self.n_border, self.n_in_blocks
        one, other = self.place[rows], self.place[cols]
        later, earlier = np.maximum(one, other), np.minimum(one, other)
        inside, corner = later < n, earlier >= n
        beside = ~inside & ~corner
        block = np.append(np.repeat(np.arange(len(self.sizes)), self.sizes), np.full(g, -1))
        apart = inside & (block[later] != block[earlier])
        inside &= ~apart
        result = np.zeros(len(rows))
        result[inside] = packed[self.in_blocks(later[inside], earlier[inside])]
        result[beside] = packed[start + earlier[beside] * g + (later[beside] - n)]
        result[corner] = packed[start + n * g + (later[corner] - n) * g + (earlier[corner] - n)]
        return result, apart

    def dense(self, packed: Array, *, triangular: bool = False) -> Array:
        """Return a packed matrix as (n_dim, n_dim): symmetric, or lower triangular in the order of `order`."""
        rows, cols = self._entries
        result = np.zeros((self.n_dim, self.n_dim))
        if triangular:
            result[rows, cols] = packed
            return result
        beside = self.in_border
        result[self.order[cols[beside]], self.order[rows[beside]]] = packed[beside]
        result[self.order[rows], self.order[cols]] = packed
        return result

    # --- vectors ---

    def split(self, vectors: Array) -> tuple[Array, Array]:
        """Return the parts of vectors, (..., n_dim), as columns: (n_local, n_vectors), (n_border, n_vectors)."""
        columns = vectors.reshape(-1, self.n_dim).T[self.order]
        return columns[: self.n_local], columns[self.n_local :]

    def join(self, local: Array, border: Array, lead: tuple[int, ...] = ()) -> Array:
        """Return the vectors, (*lead, n_dim), with these parts: the inverse of `split`."""
        result = np.empty((local.shape[1], self.n_dim))
        result[:, self.order] = (np.concatenate([local, border]) if self.n_border else local).T
        return result.reshape(*lead, self.n_dim)

    def stacked(self, local: Array) -> list[Array]:
        """Return rows of local coordinates, (n_local, m), by size of block: (n_blocks, k, m) each, as views."""
        return [local[s.where].reshape(s.n_blocks, s.size, local.shape[1]) for s in self.stacks]


def _read_only[A: NDArray[Any]](array: A) -> A:
    """Protect an array: one structure serves many states."""
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=8)
def _places(packing: Packing, pattern: Pattern) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return places in a packed matrix, and for each the entry of the pattern that belongs there."""
    n, g, start = packing.n_local, packing.n_border, packing.n_in_blocks
    later, earlier = packing.place[pattern.rows], packing.place[pattern.cols]
    later, earlier = np.maximum(later, earlier), np.minimum(later, earlier)
    entry = np.arange(pattern.n_entries)
    inside, corner = later < n, earlier >= n
    beside = ~inside & ~corner
    i, j = later[inside], earlier[inside]
    a, b = later[corner] - n, earlier[corner] - n
    last = start + n * g
    places = [packing.in_blocks(i, j), packing.in_blocks(j, i), start + earlier[beside] * g + (later[beside] - n)]
    places += [last + a * g + b, last + b * g + a]
    sources = [entry[inside], entry[inside], entry[beside], entry[corner], entry[corner]]
    return np.concatenate(places), np.concatenate(sources)


#: Pivots this many times the least one are taken for as large as the singular values, which are smaller.
_CLEAR = 1e3


@stored("structure.arrow", content=("order", "sizes"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class ArrowStructure(Packing, Structure):
    """Arrow matrices with given blocks.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block; -1 in the border.
    """

    @classmethod
    def of(cls, labels: ArrayLike) -> Self:
        """Return the structure with a block for each label, (n_dim,); negative ones mark the border."""
        return cls(np.asarray(labels))

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        triangle = self.n_border * (self.n_border + 1) // 2
        return (self.n_in_blocks + self.n_local) // 2 + self.n_local * self.n_border + triangle

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 packed factors."""
        return 8 * (56 * self.n_entries + 64 * n_dim)

    def on_diagonal(self, matrix: Array) -> NDArray[np.intp]:
        """Return where a packed matrix has the diagonal."""
        return self.diagonal

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""
        packed = np.zeros(self.n_entries)
        packed[self.diagonal] = entries
        return packed

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        result = curvature.copy()
        result[self.in_border] *= np.sqrt(2.0)
        return result

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        result = vector.copy()
        result[self.in_border] /= np.sqrt(2.0)
        return result

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices."""
        return {"block_order": self.order, "block_sizes": self.sizes}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays; raise ValueError as `from_arrays` does."""
        return cls.from_arrays(arrays["block_order"], arrays["block_sizes"])

    # --- factors and vectors ---

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return self.join(*self._times(factor, vectors, transposed), vectors.shape[:-1])

    def _times(self, factor: Array, vectors: Array, transposed: bool) -> tuple[Array, Array]:
        t, (local, border) = self.unpack(factor), self.split(vectors)
        if not transposed:
            return self._rows(stacks.times, t.blocks, local), t.border.T @ local + t.corner @ border
        first = self._rows(stacks.times, _turned(t.blocks), local)
        return first + t.border @ border if self.n_border else first, t.corner.T @ border

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""
        return self.join(*self._solve(factor, vectors, transposed), vectors.shape[:-1])

    def _solve(self, factor: Array, vectors: Array, transposed: bool) -> tuple[Array, Array]:
        t, (local, border) = self.unpack(factor), self.split(vectors)
        if not transposed:
            first = self._rows(stacks.solve_lower, t.blocks, local)
            return first, _solve_corner(t.corner, border - t.border.T @ first)
        last = _solve_corner(t.corner, border, transpose=True)
        local = local - t.border @ last if self.n_border else local
        return self._rows(stacks.solve_upper, _turned(t.blocks), local), last

    def squares(self, factor: Array, sign: int, vectors: Array) -> Array:
        """Return v^T P v for the precision P of each vector, where the factor is of the covariance, or of P."""
        first, last = (self._solve if sign > 0 else self._times)(factor, vectors, sign < 0)
        return np.sum(first**2, axis=0) + np.sum(last**2, axis=0)

    def _rows(self, operation: Callable[[Array, Array], Array], blocks: list[Array], rows: Array) -> Array:
        """Return what an operation makes of blocks and of their rows of local coordinates, (n_local, m)."""
        if not rows.size:
            return rows.copy()
        parts = [operation(b, r).reshape(-1, rows.shape[1]) for b, r in zip(blocks, self.stacked(rows), strict=True)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    # --- factors ---

    def product(self, left: Array, right: Array) -> Array:
        """Return the product of two factors."""
        a, b = self.unpack(left), self.unpack(right)
        border = self._rows(stacks.times, _turned(b.blocks), a.border) + b.border @ a.corner.T
        return self.pack(Parts(list(map(stacks.times, a.blocks, b.blocks)), border, a.corner @ b.corner))

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first factor times the second one."""
        a, b = self.unpack(left), self.unpack(right)
        blocks = [np.tril(stacks.solve_lower(x, y)) for x, y in zip(a.blocks, b.blocks, strict=True)]
        beside = b.border - self._rows(stacks.times, _turned(blocks), a.border)
        corner = np.tril(_solve_corner(a.corner, b.corner))
        return self.pack(Parts(blocks, _solve_corner(a.corner, beside.T).T, corner))

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first factor times the inverse of the second one."""
        a, b = self.unpack(left), self.unpack(right)
        blocks = [
            np.tril(stacks.transposed(stacks.solve_upper(stacks.transposed(y), stacks.transposed(x))))
            for x, y in zip(a.blocks, b.blocks, strict=True)
        ]
        corner = np.tril(_solve_corner(b.corner, a.corner.T, transpose=True).T)
        border = self._rows(stacks.solve_upper, _turned(b.blocks), a.border - b.border @ corner.T)
        return self.pack(Parts(blocks, border, corner))

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return F F^T, or, without a border, F^T F."""
        assert not (transposed and self.n_border)
        t = self.unpack(factor)
        turned = _turned(t.blocks)
        blocks = list(map(stacks.times, *((turned, t.blocks) if transposed else (t.blocks, turned))))
        border = self._rows(stacks.times, t.blocks, t.border)
        return self.pack(Parts(blocks, border, t.border.T @ t.border + t.corner @ t.corner.T))

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations; of a precision by Takahashi's recursions, block by block."""
        t = self.unpack(factor)
        if sign > 0:
            local = [np.sum(b**2, axis=2).ravel() for b in t.blocks]
            last = np.sum(t.border**2, axis=0) + np.sum(t.corner**2, axis=1)
        else:
            corner, beside = self._border_roots(t)
            within = [np.sum(stacks.inverse(b) ** 2, axis=1).ravel() for b in t.blocks]
            local, last = [np.concatenate([*within, []]) + np.sum(beside**2, axis=1)], np.sum(corner**2, axis=1)
        return np.sqrt(np.concatenate([*local, last]))[self.place]

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of F F^T, (n,), or, for sign -1, of its inverse."""
        if sign > 0:
            return self.entries(self.gram(factor), rows, cols)[0]
        t = self.unpack(factor)
        result, apart = self.entries(self._covariance(t), rows, cols)
        beside = self._border_roots(t)[1]  # of two blocks, what the border makes of them
        i, j = self.place[rows[apart]], self.place[cols[apart]]
        result[apart] = np.einsum("ij,ij->i", beside[i], beside[j])
        return result

    def merged(self, factors: tuple[Array, Array], apart: Array, weight: float, sign: int) -> Array | None:
        """Return the factor for the mean, and the covariances within the structure, of a mixture of two Gaussians."""
        first, second = (self.unpack(factor) for factor in factors)
        if sign > 0:
            assert not self.n_border
            columns = self.stacked(self.split(apart)[0])
            made = map(stacks.merged, first.blocks, second.blocks, columns, [weight] * len(columns))
            return self._all_blocks(made)
        between = self.outer(apart[None], apart[None])
        mixed = (1.0 - weight) * self._covariance(first) + weight * self._covariance(second)
        return self._factor_of_covariance(self.unpack(mixed + weight * (1.0 - weight) * between))

    # --- curvatures ---

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return T^-1 P T^-T for the factor T of a precision and P = -H, with H the mean Hessian."""
        assert sign < 0
        if hessian.pattern is None:
            raise ValueError("The Hessian of this target counts as dense: take another family.")
        matrix = self.unpack(-self.from_values(hessian.pattern, hessian.values()))
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            return self.congruence(self.unpack(factor), matrix)

    def congruence(self, t: Parts, matrix: Parts) -> Array:
        """Return T^-1 P T^-T for a lower-triangular T and a symmetric P, packed."""
        blocks = [_between(a, p) for a, p in zip(t.blocks, matrix.blocks, strict=True)]
        beside = self._rows(stacks.solve_lower, t.blocks, matrix.border)
        turned = self._rows(stacks.times, blocks, t.border)
        crossed = t.border.T @ (beside - 0.5 * turned)
        corner = _solve_corner(t.corner, matrix.corner - crossed - crossed.T)
        corner = linalg.symmetrise(_solve_corner(t.corner, corner.T))
        return self.pack(Parts(blocks, _solve_corner(t.corner, (beside - turned).T).T, corner))

    def squared(self, curvature: Array) -> Array:
        """Return A A where there is no border: others would be filled in."""
        assert not self.n_border
        return self._blocks([a @ a for a in self.unpack(curvature).blocks])

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the factor L with A = L L^T, or, without a border, L^T L; None where A is not positive definite.

        Nor is a relative precision, of sums with 1, that cancels to rounding: in a block, in the border, or across the
        two.
        """
        assert not (reverse and self.n_border)
        matrix = self.unpack(curvature)
        blocks, least, terms = [], 1.0, [linalg.relative_terms(stacks.diagonal(block)) for block in matrix.blocks]
        for block, size in zip(matrix.blocks, terms, strict=True):
            factor = stacks.reverse_cholesky(block, size) if reverse else stacks.cholesky(block, size)
            if factor is None:
                return None
            blocks.append(stacks.transposed(factor) if reverse else factor)
            least = min(least, float(np.min(stacks.diagonal(factor) / np.sqrt(size))))
        if not self.n_border:
            return self._blocks(blocks)
        border, size = (
            self._rows(stacks.solve_lower, blocks, matrix.border),
            linalg.relative_terms(np.diagonal(matrix.corner)),
        )
        corner = linalg.cholesky(matrix.corner - border.T @ border, size)
        if corner is None:
            return None
        least *= float(np.min(np.diagonal(corner) / np.sqrt(size), initial=1.0))
        if blocks and least < _CLEAR * linalg.LEAST_PIVOT:
            # Of the inverse of L, in units of the terms, what its border has: no column may exceed an inverse pivot.
            across = self._rows(stacks.solve_upper, _turned(blocks), _solve_corner(corner, border.T).T)
            if np.max(np.sqrt(np.concatenate(terms, axis=None)) * np.abs(across).sum(axis=1)) >= 1 / linalg.LEAST_PIVOT:
                return None
        return self.pack(Parts(blocks, border, corner))

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return L with f(A) = L^T L for a positive function of the eigenvalues of blocks without a border.

        None where that is not finite, or where values are so far apart that rounding hides the small ones.
        """
        assert not self.n_border
        uppers = (stacks.reverse_cholesky_of_function(a, function) for a in self.unpack(curvature).blocks)
        return self._all_blocks(None if upper is None else stacks.transposed(upper) for upper in uppers)

    def half(self, curvature: Array) -> Array:
        """Return the lower triangle with a halved diagonal."""
        a = self.unpack(curvature)
        return self.pack(Parts(list(map(stacks.half_triangle, a.blocks)), a.border, linalg.half_triangle(a.corner)))

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the entries that a factor has of F^-T A."""
        t, a = self.unpack(factor), self.unpack(curvature)
        last = _solve_corner(t.corner, a.border.T, transpose=True)
        through = zip(t.blocks, a.blocks, self.stacked(t.border), self.stacked(last.T), strict=True)
        blocks = [
            np.tril(stacks.solve_upper(stacks.transposed(b), m - r @ stacks.transposed(c) if self.n_border else m))
            for b, m, r, c in through
        ]
        return self.pack(Parts(blocks, last.T, np.tril(_solve_corner(t.corner, a.corner, transpose=True))))

    # --- outer products ---

    def outer(self, left: Array, right: Array) -> Array:
        """Return the mean of left_b right_b^T, without what is between blocks and above the border."""
        n = len(left)
        (first, first_last), (second, second_last) = self.split(left), self.split(right)
        pairs = zip(self.stacked(first), self.stacked(second), strict=True)
        blocks = [a @ stacks.transposed(b) / n for a, b in pairs]
        return self.pack(Parts(blocks, second @ (first_last.T / n), first_last @ (second_last.T / n)))

    def lower(self, outer: Array) -> Array:
        """Return the entries of a factor."""
        a = self.unpack(outer)
        return self.pack(Parts(list(map(np.tril, a.blocks)), a.border, np.tril(a.corner)))

    def mirrored(self, outer: Array) -> Array:
        """Return the curvature that has these in its lower triangle."""
        a = self.unpack(outer)
        corner = np.tril(a.corner) + np.tril(a.corner, -1).T
        return self.pack(Parts(list(map(stacks.mirrored, a.blocks)), a.border, corner))

    # --- covariances, of a factor of the precision ---

    def _border_roots(self, t: Parts) -> tuple[Array, Array]:
        """Return R_G and, by rows, R_i for which R_G R_G^T is the covariance of the border, R_i R_G^T with a block."""
        corner = _solve_corner(t.corner, np.eye(self.n_border), transpose=True)
        return corner, -self._rows(stacks.solve_upper, _turned(t.blocks), t.border @ corner)

    def _covariance(self, t: Parts) -> Array:
        """Return the entries of (T T^T)^-1 in the structure, packed."""
        corner, beside = self._border_roots(t)
        roots = zip(map(stacks.inverse, t.blocks), self.stacked(beside), strict=True)
        blocks = [stacks.transposed(root) @ root + r @ stacks.transposed(r) for root, r in roots]
        return self.pack(Parts(blocks, beside @ corner.T, corner @ corner.T))

    def _factor_of_covariance(self, covariance: Parts) -> Array | None:
        """Return T, packed, with these entries of (T T^T)^-1; None where they are no covariances."""
        upper = linalg.reverse_cholesky(covariance.corner) if self.n_border else covariance.corner
        if upper is None:
            return None
        # The border's own precision is U^-T U^-1; the roots of what it explains are cov U^-T.
        corner = linalg.solve_upper(upper, np.eye(self.n_border)).T if self.n_border else upper
        explained = covariance.border @ corner
        blocks = []
        for cov, r in zip(covariance.blocks, self.stacked(explained), strict=True):
            of_rest = stacks.reverse_cholesky(cov - r @ stacks.transposed(r), stacks.diagonal(cov))
            if of_rest is None:
                return None
            blocks.append(np.tril(stacks.inverse(stacks.transposed(of_rest))))
        # T T_G^T of block and border: minus the block's precision given the border, times the regression on it.
        border = -self._rows(stacks.times, _turned(blocks), explained @ corner.T)
        return self.pack(Parts(blocks, border, np.tril(corner)))

    def _blocks(self, blocks: Iterable[Array]) -> Array:
        """Return the packed matrix with these blocks and no border."""
        return self.pack(Parts(list(blocks), np.empty((self.n_local, 0)), np.empty((0, 0))))

    def _all_blocks(self, blocks: Iterable[Array | None]) -> Array | None:
        """Return the packed matrix with these blocks and no border; None where one is None."""
        found = list(blocks)
        kept = [block for block in found if block is not None]
        return self._blocks(kept) if len(kept) == len(found) else None


def _turned(blocks: list[Array]) -> list[Array]:
    return list(map(stacks.transposed, blocks))


def _solve_corner(corner: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Solve with a lower-triangular corner, which may be empty."""
    return linalg.solve_lower(corner, rhs, transpose=transpose) if len(corner) else rhs


def _between(factors: Array, matrices: Array) -> Array:
    """Return T^-1 P T^-T for each block."""
    half = stacks.solve_lower(factors, matrices)
    return stacks.symmetrise(stacks.solve_lower(factors, np.ascontiguousarray(stacks.transposed(half))))
