r"""Multivariate Student-t as a scale mixture of Gaussians, with degrees of freedom that are fitted.

:math:`w \sim \mathrm{InvGamma}(a, a)` and :math:`\theta \mid w \sim N(\mu, w \Sigma)`: then :math:`E[1/w] = 1`, and
:math:`\theta` has a t density with :math:`2a` degrees of freedom [1]_.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from numpy.typing import NDArray
from scipy.special import digamma, gammainccinv, gammaln

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.families.family import (
    NO_IVON,
    NO_QUADRATURE,
    Family,
    FamilyOptions,
    Maker,
    ModelForm,
    Product,
    Refusal,
    Traits,
)
from pymc_ngvi.families.gaussian import FullState, of_tag, with_tag_of
from pymc_ngvi.families.matrices.structure import LOG_2PI

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
    gaussian : GaussianState
        N(mu, Sigma), on the unconstrained scale: the draws with w = 1.
    log_shape : float
        log a; a > 1, so that there is a covariance.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.families import FullState
    >>> from pymc_ngvi.families.student_t import StudentTState
    >>> q = StudentTState(FullState(np.array([1.0]), np.array([[2.0]])), np.log(2.5))
    >>> print(round(q.degrees_of_freedom, 6), q.mean(), q.sd().round(3))  # 2 sqrt(5/3)
    5.0 [1.] [2.582]
    """

    gaussian: GaussianState
    log_shape: float

    n_uniform = 1
    globals_ = None

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
        if self.log_shape >= np.log(MOST_SHAPE) - 1e-9:
            return (
                f"q is Gaussian: its degrees of freedom have reached their upper limit, {2 * MOST_SHAPE:,.0f}, since "
                "tails heavier than a Gaussian's only lower the ELBO. family='full' gives the same for less."
            )
        if self.log_shape <= np.log(LEAST_SHAPE) + 1e-9:
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

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep: the arrays of the Gaussian with the tag of its class, and log a."""
        return {**with_tag_of(self.gaussian), _LOG_SHAPE: np.array(self.log_shape)}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the state of these arrays: the inverse of `arrays`; raise ValueError where there is none."""
        return cls(of_tag(arrays), float(arrays[_LOG_SHAPE]))

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

    def cov_block(self, index: NDArray[np.intp]) -> Array:
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

    gaussian: Maker[GaussianState] = FullState
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
                ("pathwise", "gauss_newton"),
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

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family around all Gaussians."""
        return cls()

    def from_scale(self, location: Array, scale: Array) -> StudentTState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``."""
        scale = np.sqrt((self.shape - 1.0) / self.shape) * np.asarray(scale, dtype=np.float64)
        return StudentTState(self.gaussian.from_scale(location, scale), float(np.log(self.shape)))

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own: that of the Gaussian."""
        return int(self.gaussian.memory_bytes(n_dim))
