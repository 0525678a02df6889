"""Gaussian with a sparse precision: blocks that are independent given a border of global coordinates [1]_.

The posterior precision of a hierarchical model is an arrow matrix: given the global parameters, groups are independent.
q holds the Cholesky factor of the precision, which has no more entries, with the border last.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

import functools

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian, Outer
from pymc_ngvi.families import arrow, stacks
from pymc_ngvi.families.arrow import ArrowStructure, Parts
from pymc_ngvi.families.arrow_moments import border_roots, covariance_parts, factor_of_covariance
from pymc_ngvi.families.family import NO_GAUSS_NEWTON, OF_PRECISION, Family, FamilyOptions, ModelForm, Refusal, Traits
from pymc_ngvi.families.lower import LOG_2PI, SINGULAR
from pymc_ngvi.families.packed import PackedState, memory_bytes


@stored("gaussian.sparse")
@dataclass(frozen=True)
class SparseState(PackedState):
    """N(mean, (T T^T)^-1) with a lower-triangular arrow matrix T; the whitener is T^-T.

    A curvature is a symmetric arrow matrix, packed.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        T, with a positive diagonal, packed as ``structure`` says.
    structure : ArrowStructure
    """

    structure: ArrowStructure

    exact_metric = True
    factor_sign = -1

    @property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates of the border."""
        return self.structure.border

    @property
    def n_params(self) -> int:
        """Numbers in the mean and in the factor."""
        return self.n_dim + self.structure.n_lower

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state; the last two are ints."""
        return {
            "mean": self.location,
            "precision_cholesky_blocks": self.factor,
            "block_order": self.structure.order,  # type: ignore[dict-item]
            "block_sizes": self.structure.sizes,  # type: ignore[dict-item]
        }

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays.

        Raises
        ------
        ValueError
            If the blocks are no partition of the coordinates.
        """
        structure = ArrowStructure.from_arrays(params["block_order"], params["block_sizes"])
        return cls(params["mean"], params["precision_cholesky_blocks"], structure)

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        result: Array = self.location + self.unwhiten(base)
        return result

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z_local, z_border = self._standardised(theta - self.location)
        square: Array = np.sum(z_local**2, axis=0) + np.sum(z_border**2, axis=0)
        return -0.5 * square + self._log_det() - 0.5 * self.n_dim * LOG_2PI

    def sd(self) -> Array:
        """Return the standard deviations, by the block form of Takahashi's recursions."""
        corner, beside = self._covariance_roots
        blocks = self.structure.stacked(np.ones((self.structure.n_local, 1)))
        identity = [np.broadcast_to(np.eye(b.shape[1]), b.shape[:1] + (b.shape[1],) * 2) for b in blocks]
        own = [
            np.sum(stacks.solve_lower(t, i) ** 2, axis=1).ravel()
            for t, i in zip(self._parts.blocks, identity, strict=True)
        ]
        variance = np.concatenate([*own, np.empty(0)]) + np.sum(beside**2, axis=1)
        return self.structure.join(np.sqrt(variance)[:, None], np.sqrt(np.sum(corner**2, axis=1))[:, None]).ravel()

    def cov(self) -> Array:
        """Return the covariance, dense."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)), without that of the others."""
        unit = np.zeros((len(index), self.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        roots = self.whiten(unit)
        result: Array = roots @ roots.T
        return result

    @functools.cached_property
    def _covariance_roots(self) -> tuple[Array, Array]:
        return border_roots(self.structure, self._parts)

    # --- between the space of theta and the whitened one ---

    def whiten(self, grad: Array) -> Array:
        """Return T^-1 times each gradient."""
        local, border = self.structure.split(grad)
        first = self._rows("solve", local)
        last = arrow.solve_corner(self._parts.corner, border - self._parts.border.T @ first)
        return self.structure.join(first, last, grad.shape[:-1])

    def unwhiten(self, step: Array) -> Array:
        """Return T^-T times a whitened step, or each of some, (..., n_dim)."""
        local, border = self.structure.split(step)
        last = arrow.solve_corner(self._parts.corner, border, transpose=True)
        first = self._rows("transposed solve", local - self._parts.border @ last)
        return self.structure.join(first, last, step.shape[:-1])

    def dewhiten(self, grad: Array) -> Array:
        """Return T times a whitened gradient."""
        local, border = self.structure.split(grad)
        last = self._parts.border.T @ local + self._parts.corner @ border
        return self.structure.join(self._rows("times", local), last, grad.shape[:-1])

    # --- beside others ---

    def from_scale(self, location: Array, scale: Array) -> "SparseState":
        """Return the state of the same structure with uncorrelated coordinates of standard deviations ``scale``."""
        return SparseFamily(self.structure).from_scale(location, scale)

    def divergence(self, other: "SparseState") -> float:
        """Return KL(self || other), nats, for one structure; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            trace = float(np.sum(self._relative(other) ** 2))
            apart = other._standardised((self.location - other.location)[None])
            square = sum(float(np.sum(part**2)) for part in apart)
            value = 0.5 * (trace + square - self.n_dim) + self._log_det() - other._log_det()
        return value if np.isfinite(value) else np.inf

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        return self.dewhiten(self.structure.join(*self._standardised(vectors), vectors.shape[:-1]))

    def whitened_precision(self, other: "SparseState") -> Array:
        """Return T^-1 S T^-T for the precision S of another state of the same structure."""
        relative = self.structure.unpack(self._relative(other))
        return self.structure.pack(arrow.gram(self.structure, relative))

    def merged(self, other: Self, weight: float) -> Self:
        """Return the Gaussian with the mean, and the covariances within the structure, of a mixture with another.

        Raises
        ------
        LinAlgError
            Where they are nearly singular.
        """
        apart = other.location - self.location
        between = self._lower(Outer(apart[None], apart[None], 0.0))
        own, of_other = (covariance_parts(self.structure, state._parts) for state in (self, other))
        mixed = (1.0 - weight) * self.structure.pack(own) + weight * self.structure.pack(of_other)
        mixed += weight * (1.0 - weight) * self.structure.pack(between)
        parts = factor_of_covariance(self.structure, self.structure.unpack(mixed))
        if parts is None:
            raise np.linalg.LinAlgError(SINGULAR)
        return replace(self, location=self.location + weight * apart, factor=self.structure.pack(parts))

    # --- curvatures ---

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return A = -T^-1 H T^-T, with H the mean Hessian."""
        pattern = hessian.pattern
        if pattern is None:
            raise ValueError("The Hessian of this target counts as dense: take another family.")
        matrix = self.structure.from_values(pattern, hessian.values())
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            whitened = arrow.congruence(self.structure, self._parts, self.structure.unpack(-matrix))
        return self.structure.pack(whitened)

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        result = curvature.copy()
        result[self.structure.in_border] *= np.sqrt(2.0)
        return result

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        result = vector.copy()
        result[self.structure.in_border] /= np.sqrt(2.0)
        return result

    def held(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return whitened gradient and curvature for which a step leaves the coordinates of the border alone."""
        grad, parts = grad.copy(), self.structure.unpack(curvature)
        grad[self.structure.border] = 0.0
        corner = np.eye(self.structure.n_border)
        return grad, self.structure.pack(Parts(parts.blocks, np.zeros_like(parts.border), corner))

    def outer(self, whitened: Array, z: Array) -> Outer:
        """Order whitened gradients and base draws: the lower triangle is that of E[z w^T]."""
        return Outer(z, whitened, 0.0)

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix with the lower triangle of ``outer``."""
        lower = self._lower(outer)
        blocks = [stacks.mirrored(b) for b in lower.blocks]
        corner = np.tril(lower.corner) + np.tril(lower.corner, -1).T
        return self.add_to_diagonal(self.structure.pack(Parts(blocks, lower.border, corner)), outer.diagonal)

    # --- steps ---

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of precision T M T^T, and T^-T M^-1 grad; None where M is not positive definite."""
        relative = arrow.cholesky(self.structure, self.structure.unpack(matrix))
        if relative is None:
            return None
        return self._divided(self.structure.pack(relative), grad)

    def half_product(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal."""
        lower = self._lower(error) if isinstance(error, Outer) else self.structure.unpack(error)
        blocks = [stacks.half_triangle(b) for b in lower.blocks]
        half = Parts(blocks, lower.border, linalg.half_triangle(lower.corner))
        product = self.structure.pack(arrow.product(self.structure, self._parts, half))
        if isinstance(error, Outer) and error.diagonal:
            product += 0.5 * error.diagonal * self.factor
        return product

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return the entries that the factor has of its inverse transpose times I - A."""
        whole = self._lower(error) if isinstance(error, Outer) else self.structure.unpack(error)
        last = arrow.solve_corner(self._parts.corner, whole.border.T, transpose=True)
        through = self.structure.stacked(self._parts.border)
        within = [b - r @ t for b, r, t in zip(whole.blocks, through, self._columns_by_block(last), strict=True)]
        blocks = [
            np.tril(stacks.solve_upper(stacks.transposed(t), w))
            for t, w in zip(self._parts.blocks, within, strict=True)
        ]
        corner = np.tril(arrow.solve_corner(self._parts.corner, whole.corner, transpose=True))
        result = self.structure.pack(Parts(blocks, last.T, corner))
        if isinstance(error, Outer) and error.diagonal:
            diagonal = self.structure.diagonal
            result[diagonal] += error.diagonal / self.factor[diagonal]
        return result

    # --- pieces ---

    @functools.cached_property
    def _parts(self) -> Parts:
        return self.structure.unpack(self.factor)

    def _rows(self, operation: str, rows: Array) -> Array:
        return arrow.rows_of(self.structure, operation, self._parts.blocks, rows)

    def _standardised(self, apart: Array) -> tuple[Array, Array]:
        """Return T^T times vectors, (n_vectors, n_dim), as columns: those of the blocks, and of the border."""
        local, border = self.structure.split(apart)
        return self._rows("transposed times", local) + self._parts.border @ border, self._parts.corner.T @ border

    def _relative(self, other: "SparseState") -> Array:
        """Return T^-1 times the factor of another state, packed."""
        return self.structure.pack(arrow.quotient(self.structure, self._parts, other._parts))

    def _lower(self, outer: Outer) -> Parts:
        """Return the mean of left right^T, without what is between blocks and above the border."""
        n = len(outer.left)
        (left, left_last), (right, right_last) = self.structure.split(outer.left), self.structure.split(outer.right)
        blocks = [
            a @ stacks.transposed(b) / n
            for a, b in zip(self.structure.stacked(left), self.structure.stacked(right), strict=True)
        ]
        return Parts(blocks, right @ (left_last.T / n), left_last @ (right_last.T / n))

    def _columns_by_block(self, columns: Array) -> list[Array]:
        """Return columns of local coordinates, (m, n_local), by size of block: (n_blocks, m, k) each."""
        return [stacks.transposed(rows) for rows in self.structure.stacked(np.ascontiguousarray(columns.T))]

    def _divided(self, relative: Array, grad: Array) -> tuple[Self, Array] | None:
        # T' = T L for M = L L^T; T^-T M^-1 grad = T'^-T L^-1 grad.
        lower = replace(self, factor=relative)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond what numbers can hold: no state then
            factor = self.structure.pack(arrow.product(self.structure, self._parts, lower._parts))
        entries = factor[self.structure.diagonal]
        if not ((entries > 0.0).all() and linalg.all_finite(factor)):
            return None
        new = replace(self, factor=factor)
        return new, new.unwhiten(lower.whiten(grad))


@stored("family.sparse")
@dataclass(frozen=True)
class SparseFamily(Family):
    """The Gaussians whose precision is an arrow matrix of one structure.

    Parameters
    ----------
    structure : ArrowStructure
    """

    structure: ArrowStructure

    traits: ClassVar = Traits(
        name="sparse",
        also_called="sparseprecision structured hierarchical",
        states=(SparseState,),
        goes_with=OF_PRECISION,
        refuses=(
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
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the structure of the model's Hessian; raise ValueError if that counts as dense."""
        structure = model.structure()
        if structure is None:
            raise ValueError(
                "A sparse precision saves work only where the Hessian of log p has zeros, and this one has too few: it "
                "counts as dense. Take family='full', 'block' or 'diagonal', or such components."
            )
        return cls(structure)

    def from_scale(self, location: Array, scale: Array) -> SparseState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        factor = np.zeros(self.structure.n_entries)
        factor[self.structure.diagonal] = 1.0 / np.asarray(scale, dtype=np.float64)
        return SparseState(np.array(location, dtype=np.float64), factor, self.structure)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 packed factors."""
        return memory_bytes(self.structure.n_entries, n_dim)
