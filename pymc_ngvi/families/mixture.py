"""Finite mixture of Gaussians: components of one family, weights in log space."""

import math

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from scipy.special import digamma, gammainccinv, gammaln

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.families.family import (
    NO_IVON,
    NO_QUADRATURE,
    Family,
    Maker,
    Product,
    Refusal,
    Traits,
)
from pymc_ngvi.families.gaussian import LOG_2PI, AnyGaussian, DiagonalFamily, FullFamily, FullState
from pymc_ngvi.families.sparse import SparseFamily

# --- multivariate Student-t as a scale mixture of Gaussians, with degrees of freedom that are fitted ---
#
# :math:`w \sim \mathrm{InvGamma}(a, a)` and :math:`\theta \mid w \sim N(\mu, w \Sigma)`: then :math:`E[1/w] = 1`, and
# :math:`\theta` has a t density with :math:`2a` degrees of freedom [1]_.
#
# References
# ----------
# .. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
# of
#    exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914


#: Least and largest shape a of a fit: 2.2 degrees of freedom, and 20,000, where q is as good as a Gaussian.
LEAST_SHAPE, MOST_SHAPE = 1.1, 1e4
#: Shape at the start of a fit, which begins as that of a Gaussian.
START_SHAPE = MOST_SHAPE
_LOG_SHAPE = "log_shape"


def mixing_variable(shape: float, rate: float, uniforms: Array) -> Array:
    """Return the quantiles of InvGamma(shape, rate) at ``uniforms``, an array of numbers from 0 (included) to 1."""
    return rate / gammainccinv(shape, uniforms)


@stored("student_t")
@dataclass(frozen=True)
class StudentTState:
    """A t density with location mu, scale matrix Sigma and 2a degrees of freedom.

    Parameters
    ----------
    gaussian : AnyGaussian
        N(mu, Sigma), on the unconstrained scale: the draws with w = 1.
    log_shape : float
        log a; a > 1, so that there is a covariance.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.families import FullState
    >>> from pymc_ngvi.families.mixture import StudentTState
    >>> q = StudentTState(FullState(np.array([1.0]), np.array([[2.0]])), np.log(2.5))
    >>> print(round(q.degrees_of_freedom, 6), q.mean(), q.sd().round(3))  # 2 sqrt(5/3)
    5.0 [1.] [2.582]
    """

    gaussian: AnyGaussian
    log_shape: float

    n_uniform = 1

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return int(self.gaussian.n_dim)

    @property
    def shape(self) -> float:
        """The shape a of w, half the degrees of freedom."""
        return float(np.exp(self.log_shape))

    @property
    def degrees_of_freedom(self) -> float:
        """The degrees of freedom, 2a."""
        return 2.0 * self.shape

    @property
    def remark(self) -> str:
        """What there is to say where the shape has come to an end of its range, else an empty string."""
        if self.shape > MOST_SHAPE or math.isclose(self.shape, MOST_SHAPE):
            return (
                f"q is Gaussian: its degrees of freedom have reached their upper limit, {2 * MOST_SHAPE:,.0f}, since "
                "tails heavier than a Gaussian's only lower the ELBO. family='full' gives the same for less."
            )
        if self.shape < LEAST_SHAPE or math.isclose(self.shape, LEAST_SHAPE):
            return (
                f"The degrees of freedom have reached their lower limit, {2 * LEAST_SHAPE:g}: the posterior has still "
                "heavier tails, or several modes."
            )
        return ""

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state: those of the Gaussian, and log a."""
        return {**self.gaussian.params(), _LOG_SHAPE: np.array(self.log_shape)}

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state with other arrays, around a Gaussian of the same form."""
        return type(self)(self.gaussian.from_params(params), float(params[_LOG_SHAPE]))

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals and, in the last column, uniforms, (n_draws, n_dim + 1), to draws."""
        return self.scaled(base[:, :-1], mixing_variable(self.shape, self.shape, base[:, -1]))

    def scaled(self, z: Array, w: Array) -> Array:
        """Return mu + sqrt(w) C z for standard normals, (n_draws, n_dim), and mixing variables, (n_draws,)."""
        return self.gaussian.draws(np.sqrt(w)[:, None] * z)

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        a, half = self.shape, 0.5 * self.n_dim
        peak = gammaln(a + half) - gammaln(a) - half * (LOG_2PI + np.log(a)) - self._log_det()
        return peak - (a + half) * np.log1p(self.squared_distance(theta) / (2.0 * a))

    def squared_distance(self, theta: Array) -> Array:
        """Return (theta - mu)^T Sigma^-1 (theta - mu), (n_draws,)."""
        peak = -self._log_det() - 0.5 * self.n_dim * LOG_2PI
        return np.maximum(2.0 * (peak - self.gaussian.log_density(theta)), 0.0)

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        a, half = self.shape, 0.5 * self.n_dim
        peak = gammaln(a + half) - gammaln(a) - half * (LOG_2PI + np.log(a)) - self._log_det()
        return float((a + half) * (digamma(a + half) - digamma(a)) - peak)

    def mean(self) -> Array:
        """Return the mean."""
        return self.gaussian.mean()

    def sd(self) -> Array:
        """Return the standard deviations; inf where there are none."""
        return np.sqrt(self._inflation()) * self.gaussian.sd()

    def cov(self) -> Array:
        """Return the covariance; entries of the diagonal are inf where there is none."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        of_gaussian, inflation = self.gaussian.cov_block(index), self._inflation()
        return inflation * of_gaussian if np.isfinite(inflation) else np.full_like(of_gaussian, np.inf)

    # --- pieces ---

    def _log_det(self) -> float:
        """Return the log determinant of C."""
        return float(self.gaussian.entropy()) - 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def _inflation(self) -> float:
        """Return E[w], by which the covariance exceeds Sigma."""
        return self.shape / (self.shape - 1.0) if self.shape > 1.0 else np.inf


@stored("family.student_t")
@dataclass(frozen=True)
class StudentTFamily(Family[StudentTState]):
    """The t densities around the Gaussians of one family.

    Parameters
    ----------
    gaussian : Maker
        Of the Gaussians.
    shape : float, default 10,000
        The shape a at the start, above 1; where it is that large, `scale_mixture` begins as for a Gaussian.
    """

    gaussian: Maker[AnyGaussian] = FullState
    shape: float = START_SHAPE

    traits: ClassVar = Traits(
        name="student_t",
        also_called="t student multivariatet",
        states=(StudentTState,),
        goes_with=(
            Product(("natural", "natural_pd", "cholesky", "sqrt"), ("price",), ("scale_mixture",)),
            Product(("natural",), ("stein",), ("scale_mixture",)),
        ),
        refuses=(
            NO_IVON,
            NO_QUADRATURE,
            Refusal(
                "estimator",
                ("pathwise", "score", "gauss_newton"),
                "the t is fitted with Hessians, or with gradients paired with base draws: take estimator='price' or "
                "'stein'",
            ),
            Refusal(
                "update",
                ("cholesky_precision", "euclidean"),
                "the t takes natural-gradient steps and holds a factor of its scale matrix: take update='natural'",
            ),
            Refusal(
                "estimator",
                ("stein",),
                "from gradients alone the t takes steps in natural parameters: take update='natural'",
                update=("natural_pd", "cholesky", "sqrt"),
            ),
        ),
        own_rule="scale_mixture",
        is_gaussian=False,
    )

    def from_scale(self, location: Array, scale: Array) -> StudentTState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``."""
        scale = np.sqrt((self.shape - 1.0) / self.shape) * np.asarray(scale, dtype=np.float64)
        return StudentTState(self.gaussian.from_scale(location, scale), float(np.log(self.shape)))

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own: that of the Gaussian."""
        return int(self.gaussian.memory_bytes(n_dim))


#: What components can be.
COMPONENTS: dict[str, type[Family[AnyGaussian]]] = {
    family.traits.name: family for family in (FullFamily, DiagonalFamily, SparseFamily)
}
#: Components that a mixture is taken to have at least, where their number is to be found.
_UNKNOWN = 4
#: Beside the arrays of components, which have the component as their first axis.
_LOG_WEIGHTS = "log_weights"


@stored("mixture")
@dataclass(frozen=True)
class MixtureState:
    """q = sum_c w_c q_c with Gaussian q_c.

    Parameters
    ----------
    log_weights : ndarray, shape (n_components,)
        Normalised: their exponentials sum to 1.
    components : tuple of AnyGaussian
        Of one class, on the unconstrained scale.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.families import DiagonalState, MixtureState
    >>> two = [DiagonalState(np.array([m]), np.ones(1)) for m in (-2.0, 2.0)]
    >>> q = MixtureState(np.log([0.25, 0.75]), tuple(two))
    >>> q.mean(), q.cov()
    (array([1.]), array([[4.]]))
    """

    log_weights: Array
    components: tuple[AnyGaussian, ...]

    n_uniform = 1

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return int(self.components[0].n_dim)

    @property
    def n_components(self) -> int:
        """Number of components."""
        return len(self.components)

    @property
    def weights(self) -> Array:
        """Weights, (n_components,)."""
        return np.exp(self.log_weights)

    @property
    def means(self) -> Array:
        """Means of the components, (n_components, n_dim)."""
        return np.array([c.mean() for c in self.components])

    @property
    def sds(self) -> Array:
        """Standard deviations within the components, (n_components, n_dim)."""
        return np.array([c.sd() for c in self.components])

    @classmethod
    def of(cls, components: Iterable[AnyGaussian], log_weights: Array | None = None) -> Self:
        """Make a state of components and log weights that need not be normalised; equal ones by default."""
        components = tuple(components)
        given = np.zeros(len(components)) if log_weights is None else np.asarray(log_weights, dtype=np.float64)
        return cls(given - logsumexp(given), components)

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state; those of components are stacked along the first axis."""
        each = [c.params() for c in self.components]
        return {_LOG_WEIGHTS: self.log_weights, **{name: np.stack([one[name] for one in each]) for name in each[0]}}

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the mixture with other arrays, of components of the same form; their number may be another one."""
        like, n = self.components[0], len(params[_LOG_WEIGHTS])
        each = [{name: params[name][c] for name in like.params()} for c in range(n)]
        return type(self)(params[_LOG_WEIGHTS], tuple(like.from_params(own) for own in each))

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals and, in the last column, uniforms, (n_draws, n_dim + 1), to draws."""
        ends = np.cumsum(self.weights)
        chosen = np.minimum(np.searchsorted(ends, base[:, -1] * ends[-1], side="right"), self.n_components - 1)
        result = np.empty((len(base), self.n_dim))
        for c in np.unique(chosen):
            rows = chosen == c
            result[rows] = self.components[c].draws(base[rows, :-1])
        return result

    def log_densities(self, theta: Array) -> tuple[Array, Array]:
        """Return log w_c + log q_c at the rows of ``theta``, (n_draws, n_components), and log q, (n_draws,)."""
        terms: Array = np.stack([c.log_density(theta) for c in self.components], axis=1) + self.log_weights
        return terms, logsumexp(terms, axis=1)

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        return self.log_densities(theta)[1]

    def responsibilities(self, theta: Array) -> Array:
        """Return the probability that a draw belongs to each component, (n_draws, n_components)."""
        terms, log_q = self.log_densities(theta)
        return np.exp(terms - log_q[:, None])

    def mean(self) -> Array:
        """Return the mean."""
        return self.weights @ self.means

    def sd(self) -> Array:
        """Return the standard deviations."""
        apart = self.means - self.mean()
        return np.sqrt(self.weights @ (self.sds**2 + apart**2))

    def cov(self) -> Array:
        """Return the covariance."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        apart = (self.means - self.mean())[:, index]
        within = [w * c.cov_block(index) for w, c in zip(self.weights, self.components, strict=True)]
        return np.sum(within, axis=0) + (apart.T * self.weights) @ apart

    # --- components ---

    def joined(self, component: AnyGaussian, log_weight: float) -> Self:
        """Return the mixture with one more component of a weight below 1; the others make room in proportion."""
        others = self.log_weights + np.log1p(-np.exp(log_weight))
        return type(self).of((*self.components, component), np.append(others, log_weight))

    def without(self, drop: Bools) -> Self:
        """Return the mixture without some components."""
        kept = [c for c, gone in zip(self.components, drop, strict=True) if not gone]
        return type(self).of(kept, self.log_weights[~drop])


@stored("family.mixture")
@dataclass(frozen=True)
class MixtureFamily(Family[MixtureState]):
    """The mixtures of Gaussians of one family.

    Parameters
    ----------
    component : Maker
        Of components.
    n_components : int
        At most.
    """

    component: Maker[AnyGaussian]
    n_components: int = 1

    traits: ClassVar = Traits(
        name="mixture",
        also_called="gmm gaussianmixture",
        states=(MixtureState,),
        goes_with=(Product(("natural", "natural_pd", "cholesky", "sqrt"), ("price",), ("trust_region",)),),
        refuses=(
            NO_IVON,
            NO_QUADRATURE,
            Refusal(
                "estimator",
                ("stein", "pathwise", "score", "gauss_newton"),
                "components are solved on fixed draws, for which curvatures must be those of log p: take "
                "estimator='price'",
            ),
            Refusal(
                "update",
                ("cholesky_precision", "euclidean"),
                "components take natural-gradient steps: take update='natural'",
            ),
        ),
        own_rule="trust_region",
        options=("components",),
        is_gaussian=False,
        has_components=True,
    )

    @classmethod
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family with the components that the options name."""
        component = COMPONENTS[options.components or next(iter(COMPONENTS))].of(model, options)
        return cls(component, options.n_components if isinstance(options.n_components, int) else _UNKNOWN)

    def from_scale(self, location: Array, scale: Array) -> MixtureState:
        """Return the mixture of one component with uncorrelated coordinates of standard deviations ``scale``."""
        return MixtureState.of([self.component.from_scale(location, scale)])

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own: that of each component."""
        return int(self.n_components * self.component.memory_bytes(n_dim))
