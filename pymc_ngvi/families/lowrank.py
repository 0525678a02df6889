r"""Gaussian whose precision is low-rank plus diagonal, :math:`S = D^{1/2} (I + P K P^T) D^{1/2}`.

P has k orthonormal columns, K is symmetric, of either sign: narrow directions are held, and wide ones. The best q is a
factor analysis of the precision A of the posterior: A and S agree on the diagonal, and in products with S^-1 D^1/2 P. A
step takes D from outside the span of P, and eigenvectors of A, in units of D, from a block power iteration.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import ROUNDING, cholesky, relative_terms, solve_lower, symmetrise
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.families.family import NO_IVON, NO_QUADRATURE, Family, FamilyOptions, ModelForm, Product, Refusal, Traits
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.matrices.diagonal import Diagonal

_OTHERS = ("axes", "core", "beside")
_TURNS = "P turns: take step='adaptive'"
_OF_FACTORS = ("natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean")


@stored("gaussian.lowrank", content=("location", "factor", *_OTHERS))
@dataclass(frozen=True, eq=False)
class LowRankState(Gaussian[Diagonal]):
    """N(mean, S^-1), whitened by D^-1/2 (I + P K P^T)^-1/2; a curvature is A in units of D: A axes, and its diagonal.

    Parameters
    ----------
    location, factor : ndarray, shape (n_dim,)
        Mean, unconstrained; D^1/2.
    axes, core, beside : ndarray, shapes (n_dim, n_axes), (k, k), (n_axes - k,)
        Orthonormal, the first k are P; K; its eigenvalues if it went on along the other axes, which help the search.
    """

    structure: Diagonal = field(default=Diagonal(), init=False, repr=False)
    axes: Array
    core: Array
    beside: Array

    factor_sign, factor_name = -1, "root_of_diagonal"

    @property
    def exact_metric(self) -> bool:
        """Whether, along no other axis, the posterior is much wider than q: by less than a factor of two."""
        return bool(np.min(self.beside, initial=0.0) > -0.75)

    def params(self) -> dict[str, Array]:
        """Return mean, D^1/2, axes and what belongs to them, by name."""
        return {**super().params(), **{name: getattr(self, name) for name in _OTHERS}}

    @classmethod
    def of_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Return the state of these arrays: the inverse of `params`."""
        return cls(arrays["mean"], arrays[cls.factor_name], *(arrays[name] for name in _OTHERS))

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of other arrays."""
        return self.of_arrays(params)

    @cached_property
    def _span(self) -> tuple[Array, tuple[Array, Array], Array]:
        """P, (I + K)^-1/2 and its inverse, and weights: one over what each coordinate has outside the span."""
        p, (values, vectors) = self.axes[:, : len(self.core)], np.linalg.eigh(self.core)
        roots = [(vectors * (1.0 + values) ** power) @ vectors.T for power in (-0.5, 0.5)]
        outside = 1.0 - np.sum(p * p, axis=1)  # where there is next to nothing, D counts for nothing, and is set anew
        return p, (roots[0], roots[1]), np.where(outside > 1e-3, 1.0 / np.maximum(outside, 1e-3), 0.0)

    def _stretched(self, vectors: Array, inverse: bool) -> Array:
        p, roots, _ = self._span
        return vectors + (vectors @ p) @ (roots[inverse] - np.eye(len(self.core))) @ p.T

    def _whitener(self, vectors: Array, *, inverse: bool = False, transposed: bool = False) -> Array:
        if inverse == transposed:
            return super()._whitener(self._stretched(vectors, inverse), inverse=inverse)
        return self._stretched(super()._whitener(vectors, inverse=inverse), inverse)

    def _log_det(self) -> float:
        return float(np.linalg.slogdet(self._span[1][0])[1] - np.sum(np.log(self.factor)))

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = self._stretched((theta - self.location) * self.factor, inverse=True)
        return 0.5 * self.n_dim - 0.5 * np.sum(z * z, axis=-1) - self.entropy()

    def sd(self) -> Array:
        """Return the standard deviations."""
        p, (root, _), _ = self._span
        return np.sqrt(1.0 + np.sum((p @ (root @ root - np.eye(len(root)))) * p, axis=1)) / self.factor

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""
        p, (root, _), _ = self._span
        within = np.einsum("nk,nk->n", (p @ (root @ root - np.eye(len(root))))[rows], p[cols])
        return np.asarray((within + (rows == cols)) / (self.factor[rows] * self.factor[cols]))

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        raise NotImplementedError("a low-rank Gaussian is no diagonal one: this is not known of it")

    divergence = whitened_precision = outer_mean = squared = scaled_columns = _refuse

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the curvature, from products with the mean Hessian and its diagonal."""
        products = hessian.products(np.ascontiguousarray(self.axes.T / self.factor))
        return -np.column_stack([(products / self.factor).T, hessian.diagonal() / self.factor**2])

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * S: whitened, that is the identity."""
        p, k = self._span[0], len(self.core)
        products = np.column_stack([p @ self.core, self.axes[:, k:] * self.beside])
        return curvature + value * np.column_stack([self.axes + products, 1.0 + np.sum(products[:, :k] * p, axis=1)])

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - S as far as this family can change it."""
        return self._changing(self.add_to_diagonal(curvature, -1.0))

    def _changing(self, curvature: Array) -> Array:
        k = len(self.core)  # the same products with P, and the same diagonal; nothing else
        return np.column_stack([a := curvature[:, :k], self._span[0] @ (a.T @ self.axes[:, k:]), curvature[:, -1]])

    def _within(self, products: Array) -> Array:
        """Return the diagonal of what a symmetric matrix has in the span of P, from its products with P."""
        return np.asarray(np.sum((p := self._span[0]) * (2.0 * products - p @ (p.T @ products)), axis=1))

    def _parts(self, curvature: Array) -> tuple[Array, Array]:
        products, root = curvature[:, : len(self.core)], self._span[1][0]  # whitened, and the diagonal outside P
        return self._stretched((products @ root).T, inverse=False).T, curvature[:, -1] - self._within(products)

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of the whitened curvature."""
        products, outside = self._parts(curvature)
        return self._within(products) + outside

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are, about, those of what this family can change."""
        p, (products, outside) = self._span[0], self._parts(curvature)
        twice = products + (np.sqrt(2.0) - 1.0) * (products - p @ (p.T @ products))
        return np.column_stack([twice, np.sqrt(self._span[2]) * outside]).ravel()

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        (p, (_, inverse), weights), both = self._span, vector.reshape(self.n_dim, -1)
        once = both[:, :-1] - (1.0 - np.sqrt(0.5)) * (both[:, :-1] - p @ (p.T @ both[:, :-1]))
        products = self._stretched(once.T, inverse=True).T @ inverse
        diagonal = both[:, -1] / np.sqrt(np.maximum(weights, 1.0)) + self._within(products)
        return self._changing(np.column_stack([products, diagonal]))

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state nearest to a precision, and the step of the mean; None where that is not positive."""
        k, weights, diagonal = len(self.core), self._span[2], matrix[:, -1]
        units = np.where(weights > 0.0, weights * (diagonal - self._within(matrix[:, :k])), diagonal)  # of the old D
        root = np.sqrt(np.where(units > 0.5, units, 0.25 / np.maximum(1.0 - units, 0.25)))[:, None]  # positive anyhow
        axes, products = self.axes * root, matrix[:, :-1] / root
        basis = np.linalg.qr(np.column_stack([axes, products]))[0]
        axes, products = basis.T @ axes, basis.T @ products
        if (lower := cholesky(known := symmetrise(axes.T @ products), relative_terms(np.diagonal(known)))) is None:
            return None
        half, inside = solve_lower(lower, products.T), np.linalg.qr(axes)[0]  # Nystroem, and D where that is 0
        values, vectors = np.linalg.eigh(half.T @ half + np.eye(len(axes)) - inside @ inside.T)
        values = np.maximum(values, ROUNDING * values[-1])
        rest = float(np.median(values))  # k are kept, by what it costs to leave them out, D being the mean of the rest
        order = np.argsort(np.log(values) - values / rest)
        rest = max((np.sum(diagonal / root[:, 0] ** 2) - np.sum(values[order[:k]])) / max(self.n_dim - k, 1), 1e-6)
        kept = np.argsort(np.log(values) - values / rest)[: self.axes.shape[1]]
        left, _, right = np.linalg.svd(vectors[:, kept[:k]].T @ axes[:, :k])
        vectors, turn = basis @ vectors[:, kept], left @ right  # P turns no more than it has to
        turned = np.column_stack([vectors[:, :k] @ turn, vectors[:, k:]])
        core = symmetrise((turn.T * (values[kept[:k]] - 1.0)) @ turn)
        new = type(self)(self.location, self.factor * root[:, 0], turned, core, values[kept[k:]] - 1.0)
        # Narrow directions that q lacks would make the mean overshoot: it is divided by all that is known of them.
        rest = 0.5 + 0.5 * float(np.median(np.append(np.maximum(values[kept[k:]], 1.0), 1.0)))
        step = self.dewhiten(grad) / new.factor
        return new, (step / rest + vectors @ ((1.0 / values[kept] - 1.0 / rest) * (vectors.T @ step))) / new.factor


@dataclass(frozen=True)
class LowRankFamily(Family[LowRankState]):
    """The Gaussians whose precision, and covariance, are low-rank plus diagonal, with a ``rank`` of 10 by default."""

    rank: int = 10

    traits: ClassVar = Traits(
        name="lowrank",
        also_called="lowrankmultivariatenormal factor factoranalysis lowrankplusdiagonal lowrankgaussian slang",
        states=(LowRankState,),
        options=("rank",),
        goes_with=(Product(("natural",), ("price",), ("adaptive",)),),
        refuses=(
            NO_IVON,
            NO_QUADRATURE,
            Refusal("update", _OF_FACTORS, "it has no triangular factor: take update='natural'"),
            Refusal("estimator", ("stein", "pathwise", "gauss_newton"), "it needs Hessians: take estimator='price'"),
            Refusal("step", ("constant", "decay", "proximal", "snngm", "adam", "sgd", "linesearch"), _TURNS),
        ),
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family of the rank that the options ask for."""
        return cls(options.rank or cls.rank)

    def from_scale(self, location: Array, scale: Array) -> LowRankState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        k, n_axes = (min(n, len(location)) for n in (self.rank, 2 * self.rank + 10))  # twice as many axes, and more
        anywhere = np.random.default_rng(1).standard_normal((len(location), n_axes))
        axes = np.linalg.qr(anywhere)[0] if n_axes < len(location) else np.eye(n_axes)
        return LowRankState(np.array(location, float), 1.0 / scale, axes, np.zeros((k, k)), np.zeros(n_axes - k))

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 64 curvatures."""
        return 64 * 8 * n_dim * (min(2 * self.rank + 10, n_dim) + 2)
