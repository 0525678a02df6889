r"""Natural gradients of a family of your own: mixtures, finite or continuous, of an exponential family.

Let :math:`q(\theta) = \int q(w)\, q(\theta \mid w)\, dw`, with a mixing distribution and a conditional that are
*minimal* exponential families, the second one for each w [1]_ [2]_:

.. math::
    q(w) \propto e^{\lambda_w \cdot T_w(w) - A_w(\lambda_w)}, \qquad
    q(\theta \mid w) \propto e^{\lambda_\theta \cdot T_\theta(\theta, w) - A_\theta(\lambda_\theta, w)}.

(base measures left out). The Fisher information F of w and theta *together* has two blocks,
:math:`U = E[Cov(T_\theta \mid w)]` and :math:`V = Cov(T_w)`. With :math:`m_\theta = E[T_\theta]`,
:math:`m_w = E[T_w]` and :math:`R = \partial m_\theta / \partial \lambda_w = Cov(T_w, E[T_\theta \mid w])`, the chain
rule is :math:`\nabla_{\lambda_\theta} L = U \nabla_{m_\theta} L` and
:math:`\nabla_{\lambda_w} L = V \nabla_{m_w} L + R \nabla_{m_\theta} L`. Divided by U and V, it is theorem 1 of [2]_:
:math:`F^{-1} \nabla L = (\nabla_{m_\theta} L, \; \nabla_{m_w} L + V^{-1} R \nabla_{m_\theta} L)`.

`natural_gradient` finds it from values of log p alone: :math:`\nabla_\lambda L = E[s h]` and :math:`F = E[s s^T]` for
the scores s of log q(w, theta) and h = log p - log q, so that :math:`F^{-1} \nabla L` are the coefficients of the
regression of h on the scores [3]_. This serves derivations and experiments in a few dimensions: with draws it is far
noisier than estimates from gradients and Hessians.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
.. [2] L. S. L. Tan (2021). Complete natural gradients for structured variational approximations in mixtures of
   exponential families. First versions of https://doi.org/10.48550/arXiv.2109.00375
.. [3] T. Salimans and D. A. Knowles (2013). Fixed-form variational posterior approximation through stochastic linear
   regression. Bayesian Analysis 8(4). https://doi.org/10.1214/13-BA858
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray
from scipy.special import gammainccinv, gammaincinv, gammaln, psi

from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import FullState
from pymc_ngvi.families.mixture import MixtureState

#: Singular value of the scores, in units of the largest, below which they count as linearly dependent.
_LEAST = 1e-11
#: Part of a mixing distribution that quadrature leaves out on each side.
_LEFT_OUT = 1e-15


class NaturalParameters(NamedTuple):
    """Natural parameters, or a direction in them.

    Parameters
    ----------
    conditional : ndarray, shape (n_conditional,)
        Those of q(theta | w).
    mixing : ndarray, shape (n_mixing,)
        Those of q(w); empty where it has none.
    """

    conditional: Array
    mixing: Array


class Points(NamedTuple):
    """Draws of w and theta together, or nodes of a quadrature.

    Parameters
    ----------
    theta : ndarray, shape (n_points, n_dim)
    w : ndarray, shape (n_points, ...)
    weights : ndarray, shape (n_points,), or None
        Of a quadrature, with a sum of 1; None for draws, which weigh the same.
    """

    theta: Array
    w: NDArray[Any]
    weights: Array | None = None


class NaturalGradient(NamedTuple):
    """F^-1 times the gradient of the ELBO, and what it is made of.

    Parameters
    ----------
    conditional, mixing : ndarray, shapes (n_conditional,) and (n_mixing,)
        The natural gradient: the direction of natural parameters.
    coupling : ndarray, shape (n_mixing,)
        V^-1 R grad_{m_theta} L, which is a part of ``mixing``: 0 where m_theta does not depend on the mixing
        distribution.
    elbo : float
        The ELBO, with the scores as control variates.
    """

    conditional: Array
    mixing: Array
    coupling: Array
    elbo: float

    @property
    def expectation(self) -> NaturalParameters:
        """Gradient with respect to the expectation parameters m_theta and m_w, each with the other held fixed."""
        return NaturalParameters(self.conditional, self.mixing - self.coupling)


class ConditionalFamily(Protocol):
    """What `natural_gradient` needs of a family: statistics, their means, and the density of theta.

    The means are the gradients of the log partition functions A_theta (in lambda_theta, at each w) and A_w.
    """

    def conditional_statistics(self, theta: Array, w: NDArray[Any]) -> Array:
        """Return T_theta, (n_points, n_conditional)."""
        ...

    def conditional_mean(self, parameters: NaturalParameters, w: NDArray[Any]) -> Array:
        """Return E[T_theta | w], (n_points, n_conditional)."""
        ...

    def mixing_statistics(self, w: NDArray[Any]) -> Array:
        """Return T_w, (n_points, n_mixing); no columns where q(w) has no parameters."""
        ...

    def mixing_mean(self, parameters: NaturalParameters) -> Array:
        """Return E[T_w], (n_mixing,)."""
        ...

    def log_density(self, parameters: NaturalParameters, theta: Array) -> Array:
        """Return log q(theta), (n_points,): w integrated out, with all constants."""
        ...


def natural_gradient(
    family: ConditionalFamily,
    parameters: NaturalParameters,
    log_density: Callable[[Array], Array],
    points: Points,
) -> NaturalGradient:
    """Return F^-1 times the gradient of the ELBO, F the Fisher information of w and theta together.

    Parameters
    ----------
    family : ConditionalFamily
    parameters : NaturalParameters
    log_density : callable
        log p, unnormalised, on the unconstrained scale: (n_points, n_dim) to (n_points,).
    points : Points
        Draws of q at ``parameters``, many more than there are parameters; or a quadrature that is exact for products
        of two statistics.

    Returns
    -------
    NaturalGradient
        From a quadrature, exact as far as that is. From draws, with an error of order n_points^-1/2 and a bias of
        order 1/n_points; with no error where log p - log q is a linear function of the scores.

    Raises
    ------
    ValueError
        If log p or log q is not finite at a point, or if the points are too few to tell parameters apart.

    Examples
    --------
    >>> import numpy as np
    >>> from conditional_family import GaussianMixture, natural_gradient, stepped
    >>> from pymc_ngvi.families import FullState, MixtureState
    >>> family = GaussianMixture(n_dim=1, n_components=1)
    >>> start = family.parameters(MixtureState.of([FullState(np.zeros(1), np.eye(1))]))
    >>> gradient = natural_gradient(family, start, lambda t: -2 * (t[:, 0] - 3) ** 2, family.quadrature(start, 5))
    >>> q = family.state(stepped(start, gradient, 1.0))
    >>> q.mean().round(6), q.sd().round(6)
    (array([3.]), array([0.5]))
    """
    theta, w, weights = points
    weights = np.full(len(theta), 1.0 / len(theta)) if weights is None else weights
    log_ratio = log_density(theta) - family.log_density(parameters, theta)
    if n_lost := np.count_nonzero(~np.isfinite(log_ratio)):
        raise ValueError(
            f"log p - log q is not finite at {n_lost:,} of {len(theta):,} points: take a start nearer to p."
        )
    means = family.conditional_mean(parameters, w)
    of_conditional = family.conditional_statistics(theta, w) - means
    of_mixing = family.mixing_statistics(w) - family.mixing_mean(parameters)
    elbo, coefficients = _regression(np.hstack([of_conditional, of_mixing]), log_ratio, weights)
    conditional, mixing = np.split(coefficients, [of_conditional.shape[1]])
    _, coupling = _regression(of_mixing, means @ conditional, weights)
    return NaturalGradient(conditional, mixing, coupling, elbo)


def stepped(parameters: NaturalParameters, gradient: NaturalGradient, step_size: float) -> NaturalParameters:
    """Return the natural parameters after a step; whether they are those of a distribution is not looked at."""
    return NaturalParameters(
        parameters.conditional + step_size * gradient.conditional, parameters.mixing + step_size * gradient.mixing
    )


def _regression(scores: Array, values: Array, weights: Array) -> tuple[float, Array]:
    """Return intercept and coefficients of a weighted least-squares regression."""
    root = np.sqrt(weights)
    matrix = root[:, None] * np.column_stack([np.ones(len(scores)), scores])
    scale = np.sqrt(np.sum(matrix**2, axis=0))
    solution, _, rank, _ = np.linalg.lstsq(matrix / np.where(scale > 0.0, scale, 1.0), root * values, rcond=_LEAST)
    if rank < len(scale):
        raise ValueError(
            f"The scores of {scores.shape[1]} parameters are linearly dependent at {len(scores):,} points: take more "
            "points, or fewer parameters."
        )
    solution = solution / scale
    return float(solution[0]), solution[1:]


# --- Gaussians in natural parameters ----------------------------------------------------------------------------------


def _lower(n_dim: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
    """Return rows and columns of a lower triangle, and how often an entry is in the symmetric matrix."""
    rows, columns = np.tril_indices(n_dim)
    return rows, columns, np.where(rows == columns, 1.0, 2.0)


def _statistics(theta: Array) -> Array:
    """Return theta and the lower triangle of theta theta^T."""
    rows, columns, _ = _lower(theta.shape[1])
    return np.hstack([theta, theta[:, rows] * theta[:, columns]])


def _expectation(gaussian: FullState) -> tuple[Array, Array]:
    """Return the statistics of the mean, and what the covariance adds to the expected ones."""
    rows, columns, _ = _lower(gaussian.n_dim)
    return _statistics(gaussian.location[None])[0], np.append(np.zeros(gaussian.n_dim), gaussian.cov()[rows, columns])


def _natural(gaussian: Any) -> Array:
    """Return (S mu, -S/2), with the two entries of S off the diagonal in one."""
    precision = gaussian.precision_product(np.eye(gaussian.n_dim))
    rows, columns, twice = _lower(gaussian.n_dim)
    return np.concatenate([precision @ gaussian.location, -0.5 * twice * precision[rows, columns]])


def _gaussian(natural: Array, n_dim: int) -> FullState:
    """Return the Gaussian of natural parameters."""
    rows, columns, twice = _lower(n_dim)
    precision = np.zeros((n_dim, n_dim))
    precision[rows, columns] = precision[columns, rows] = -2.0 * natural[n_dim:] / twice
    # In units of the coordinates' own scales: a small precision is no singular one.
    entries = np.diagonal(precision)
    scale = 1.0 / np.sqrt(np.where(entries > 0.0, entries, 1.0))
    relative = precision * np.outer(scale, scale)
    scaled = FullState.from_scale(np.zeros(n_dim), scale).precision_scaled_by(relative, scale * natural[:n_dim])
    if scaled is None:
        raise ValueError("The natural parameters have a precision that is not positive definite: take shorter steps.")
    state, mean = scaled
    return replace(state, location=mean)


def _hermite(n_dim: int, n_nodes: int) -> tuple[Array, Array]:
    """Return nodes, (n_nodes^n_dim, n_dim), and weights of an expectation under N(0, I)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n_nodes)
    grid = np.meshgrid(*[nodes] * n_dim, indexing="ij")
    product = functools.reduce(np.multiply.outer, [weights / weights.sum()] * n_dim)
    return np.stack([axis.ravel() for axis in grid], axis=1), np.asarray(product).ravel()


# --- families ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianMixture:
    """Finite mixture of Gaussians: w is the component, from 0; the mixing parameters are log odds to the last one.

    Parameters
    ----------
    n_dim, n_components : int
    """

    n_dim: int
    n_components: int

    def parameters(self, mixture: MixtureState) -> NaturalParameters:
        """Return the natural parameters of a mixture."""
        log_odds = mixture.log_weights[:-1] - mixture.log_weights[-1]
        return NaturalParameters(np.concatenate([_natural(c) for c in mixture.components]), log_odds)

    def state(self, parameters: NaturalParameters) -> MixtureState:
        """Return the mixture; raises ValueError where a precision is not positive definite."""
        parts = np.split(parameters.conditional, self.n_components)
        return MixtureState.of([_gaussian(part, self.n_dim) for part in parts], np.append(parameters.mixing, 0.0))

    def conditional_statistics(self, theta: Array, w: NDArray[Any]) -> Array:
        """Return the statistics of a Gaussian in the columns of the component, 0 in those of the others."""
        return _in_columns(_statistics(theta)[:, None], self._indicators(w))

    def conditional_mean(self, parameters: NaturalParameters, w: NDArray[Any]) -> Array:
        """Return the expected statistics of the component, in its columns."""
        each = np.array([[np.add(*_expectation(c)) for c in self.state(parameters).components]])
        return _in_columns(each, self._indicators(w))

    def mixing_statistics(self, w: NDArray[Any]) -> Array:
        """Return the indicators of all components but the last."""
        return self._indicators(w)[:, :-1]

    def mixing_mean(self, parameters: NaturalParameters) -> Array:
        """Return the weights of all components but the last."""
        return self.state(parameters).weights[:-1]

    def log_density(self, parameters: NaturalParameters, theta: Array) -> Array:
        """Return log q(theta)."""
        return self.state(parameters).log_density(theta)

    def draws(self, parameters: NaturalParameters, n_draws: int, rng: np.random.Generator) -> Points:
        """Return draws."""
        q = self.state(parameters)
        w, z = rng.choice(self.n_components, n_draws, p=q.weights), rng.standard_normal((n_draws, self.n_dim))
        theta = np.empty_like(z)
        for c, component in enumerate(q.components):
            theta[w == c] = component.draws(z[w == c])
        return Points(theta, w)

    def quadrature(self, parameters: NaturalParameters, n_nodes: int) -> Points:
        """Return Gauss-Hermite nodes: ``n_nodes`` along each coordinate, for each component."""
        q, (z, weights) = self.state(parameters), _hermite(self.n_dim, n_nodes)
        theta = np.concatenate([c.draws(z) for c in q.components])
        return Points(theta, np.repeat(np.arange(self.n_components), len(z)), np.outer(q.weights, weights).ravel())

    def _indicators(self, w: NDArray[Any]) -> Array:
        return np.asarray(w[:, None] == np.arange(self.n_components), dtype=np.float64)


def _in_columns(statistics: Array, indicators: Array) -> Array:
    """Return statistics, (n_points or 1, n_components or 1, n_statistics), in the columns of the components."""
    return (indicators[:, :, None] * statistics).reshape(len(indicators), -1)


@dataclass(frozen=True)
class StudentT:
    """Multivariate Student t with 2a degrees of freedom: w ~ InvGamma(a, a), theta | w ~ N(mu, w Sigma).

    The natural parameters are those of N(mu, Sigma), and a.

    Parameters
    ----------
    n_dim : int
    """

    n_dim: int

    def parameters(self, gaussian: FullState, shape: float) -> NaturalParameters:
        """Return the natural parameters of location mu and scale Sigma, those of a Gaussian, and of a shape a."""
        return NaturalParameters(_natural(gaussian), np.array([shape], dtype=np.float64))

    def state(self, parameters: NaturalParameters) -> tuple[FullState, float]:
        """Return N(mu, Sigma) and a; raises ValueError where they are not positive (definite)."""
        shape = float(parameters.mixing[0])
        if not shape > 0.0:
            raise ValueError(f"The shape a is {shape:.3g}, and must be positive: take shorter steps.")
        return _gaussian(parameters.conditional, self.n_dim), shape

    def conditional_statistics(self, theta: Array, w: NDArray[Any]) -> Array:
        """Return the statistics of a Gaussian, over w."""
        return np.asarray(_statistics(theta) / w[:, None])

    def conditional_mean(self, parameters: NaturalParameters, w: NDArray[Any]) -> Array:
        """Return (mu, mu mu^T) / w, and Sigma added to the second."""
        of_mean, of_scale = _expectation(self.state(parameters)[0])
        return np.asarray(of_mean / w[:, None] + of_scale)

    def mixing_statistics(self, w: NDArray[Any]) -> Array:
        """Return -(log w + 1/w)."""
        return np.asarray(-(np.log(w) + 1.0 / w)[:, None])

    def mixing_mean(self, parameters: NaturalParameters) -> Array:
        """Return digamma(a) - log a - 1."""
        return np.asarray(psi(parameters.mixing) - np.log(parameters.mixing) - 1.0)

    def log_density(self, parameters: NaturalParameters, theta: Array) -> Array:
        """Return log q(theta)."""
        gaussian, shape = self.state(parameters)
        apart, half = theta - gaussian.location, 0.5 * self.n_dim
        square = np.sum(apart * gaussian.precision_product(apart), axis=1)
        constant = gaussian.log_density(gaussian.location[None])[0] + gammaln(shape + half) - gammaln(shape)
        return np.asarray(constant - half * np.log(shape) - (shape + half) * np.log1p(0.5 * square / shape))

    def draws(self, parameters: NaturalParameters, n_draws: int, rng: np.random.Generator) -> Points:
        """Return draws."""
        gaussian, shape = self.state(parameters)
        w = shape / rng.gamma(shape, size=n_draws)
        return Points(self._at(gaussian, w, rng.standard_normal((n_draws, self.n_dim))), w)

    def quadrature(self, parameters: NaturalParameters, n_nodes: int) -> Points:
        """Return ``n_nodes`` evenly spaced log w, with as many Gauss-Hermite nodes along each coordinate."""
        (gaussian, shape), (z, weights) = self.state(parameters), _hermite(self.n_dim, n_nodes)
        # a/w is a gamma variable, and the density of its logarithm falls off fast on both sides.
        ends = [float(np.log(end(shape, _LEFT_OUT))) for end in (gammaincinv, gammainccinv)]
        log_ratio = np.linspace(ends[0], ends[1], n_nodes)
        of_w = np.exp(shape * log_ratio - np.exp(log_ratio) - gammaln(shape))
        w = np.repeat(shape * np.exp(-log_ratio), len(z))
        theta = self._at(gaussian, w, np.tile(z, (n_nodes, 1)))
        return Points(theta, w, np.outer(of_w / of_w.sum(), weights).ravel())

    def _at(self, gaussian: FullState, w: Array, z: Array) -> Array:
        return gaussian.draws(np.sqrt(w)[:, None] * z)
