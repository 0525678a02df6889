"""Densities that no Gaussian fits, known exactly: as PyMC models, as log densities in NumPy, and as exact draws.

Log densities are written out by hand, with their Jacobians, and normalised; that of the model is larger by ``log_z``.
Everything is on the unconstrained scale, in the order of the model's value variables.
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from numpy.typing import NDArray
from scipy.special import gammaln, log_expit, logsumexp

Array = NDArray[np.float64]
LOG_2PI = float(np.log(2 * np.pi))


@dataclass(frozen=True, eq=False)
class Modes:
    """Where a density has its mass.

    Parameters
    ----------
    weights : ndarray, shape (n_modes,)
        Mass of each mode.
    centres : ndarray, shape (n_modes, n_dim)
    whiteners : ndarray, shape (n_modes, n_dim, n_dim)
        W with ``W @ (theta - centre)`` of unit scale around the centre.
    log_shares : callable
        Points, (n_points, n_dim), to the log probability that each belongs to each mode, (n_points, n_modes).
    """

    weights: Array
    centres: Array
    whiteners: Array
    log_shares: Callable[[Array], Array]

    def distances(self, theta: Array) -> Array:
        """Return the Mahalanobis distance of each point from each mode, (n_points, n_modes)."""
        return np.linalg.norm(np.einsum("kij,nkj->nki", self.whiteners, theta[:, None] - self.centres), axis=2)

    def masses(self, theta: Array) -> Array:
        """Return the part of draws, (n_draws, n_dim), that belongs to each mode, (n_modes,)."""
        return np.exp(self.log_shares(theta)).mean(axis=0)


@dataclass(frozen=True, eq=False)
class Target:
    """A density with all the answers.

    Parameters
    ----------
    name : str
    value_names : tuple of str
        Value variables of the model, in the order of the coordinates.
    n_dim : int
    build : callable
        Returns the PyMC model, the same each time.
    sample : callable
        ``sample(n, rng)``: independent draws, (n, n_dim).
    log_density : callable
        Points, (n_points, n_dim), to the normalised log density, (n_points,).
    log_z : float
        Log of the integral of the model's density.
    modes : Modes, optional
    options : dict
        Of a fit: where it should start.
    mean, sd : ndarray, shape (n_dim,), optional
        Where they are asked for.
    """

    name: str
    value_names: tuple[str, ...]
    n_dim: int
    build: Callable[[], pm.Model]
    sample: Callable[[int, np.random.Generator], Array]
    log_density: Callable[[Array], Array]
    log_z: float = 0.0
    modes: Modes | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mean: Array | None = None
    sd: Array | None = None


# --- mixtures of Gaussians and of Student-t ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Elliptical:
    """A mixture of Gaussians, or of Student-t, with scale matrices V diag(s^2) V^T.

    Parameters
    ----------
    weights : ndarray, shape (n_components,)
    centres : ndarray, shape (n_components, n_dim)
    axes : ndarray, shape (n_components, n_dim, n_dim)
        V, orthogonal.
    scales : ndarray, shape (n_components, n_dim)
        s.
    dof : float, optional
        Degrees of freedom; Gaussian where there are none.
    """

    weights: Array
    centres: Array
    axes: Array
    scales: Array
    dof: float | None = None

    @property
    def n_dim(self) -> int:
        return self.centres.shape[1]

    @property
    def whiteners(self) -> Array:
        return np.swapaxes(self.axes / self.scales[:, None, :], 1, 2)

    @property
    def _log_peaks(self) -> Array:
        """Log of weight times density at the centre, (n_components,)."""
        d, nu = self.n_dim, self.dof
        if nu is None:
            constant = -0.5 * d * LOG_2PI
        else:
            constant = gammaln(0.5 * (nu + d)) - gammaln(0.5 * nu) - 0.5 * d * np.log(nu * np.pi)
        return np.log(self.weights) + constant - np.log(self.scales).sum(axis=1)

    def _log_terms(self, squares: Any, log1p: Callable[[Any], Any]) -> Any:
        """Return log of weight times density at squared Mahalanobis distances (..., n_components)."""
        if self.dof is None:
            return self._log_peaks - 0.5 * squares
        return self._log_peaks - 0.5 * (self.dof + self.n_dim) * log1p(squares / self.dof)

    def log_terms(self, theta: Array) -> Array:
        z = np.einsum("kij,nkj->nki", self.whiteners, theta[:, None] - self.centres)
        return self._log_terms((z**2).sum(axis=2), np.log1p)

    def log_density(self, theta: Array) -> Array:
        return logsumexp(self.log_terms(theta), axis=1)

    def log_shares(self, theta: Array) -> Array:
        terms = self.log_terms(theta)
        return terms - logsumexp(terms, axis=1, keepdims=True)

    def sample(self, n: int, rng: np.random.Generator) -> Array:
        k = rng.choice(len(self.weights), n, p=self.weights)
        z = rng.standard_normal((n, self.n_dim))
        if self.dof is not None:
            z /= np.sqrt(rng.chisquare(self.dof, (n, 1)) / self.dof)
        return self.centres[k] + np.einsum("nij,nj->ni", self.axes[k], self.scales[k] * z)

    def build(self) -> pm.Model:
        n_components, stacked = len(self.weights), self.whiteners.reshape(-1, self.n_dim)
        offsets = np.einsum("kij,kj->ki", self.whiteners, self.centres)
        with pm.Model() as model:
            x = pm.Flat("x", shape=self.n_dim)
            z = (stacked @ x).reshape((n_components, self.n_dim)) - offsets
            pm.Potential("log_p", pt.logsumexp(self._log_terms(pt.sum(z**2, axis=1), pt.log1p)))
        return model

    def target(self, name: str, **options: Any) -> Target:
        modes = Modes(self.weights, self.centres, self.whiteners, self.log_shares)
        functions = self.build, self.sample, self.log_density
        return Target(name, ("x",), self.n_dim, *functions, modes=modes, options=options)


def _rotations(angles: Any) -> Array:
    cos, sin = np.cos(angles), np.sin(angles)
    return np.moveaxis(np.array([[cos, -sin], [sin, cos]]), 2, 0)


def two_modes() -> Target:
    """Two Gaussians, six standard deviations apart; the origin is between them."""
    mixture = Elliptical(
        weights=np.array([0.3, 0.7]),
        centres=np.array([[-2.5, -0.8], [2.5, 0.8]]),
        axes=_rotations([0.9, -0.4]),
        scales=np.array([[1.4, 0.7], [1.1, 0.6]]),
    )
    return mixture.target("two modes")


def ten_components() -> Target:
    """Ten Gaussians in twenty dimensions, with random centres in a box and covariances of condition up to 100."""
    rng = np.random.default_rng(20)
    n_components, d = 10, 20
    log_variances = rng.uniform(-np.log(10.0), np.log(10.0), (n_components, d))
    log_variances -= log_variances.mean(axis=1, keepdims=True)
    mixture = Elliptical(
        weights=0.05 + 0.5 * rng.dirichlet(np.full(n_components, 4.0)),
        centres=rng.uniform(-5.0, 5.0, (n_components, d)),
        axes=np.linalg.qr(rng.standard_normal((n_components, d, d)))[0],
        scales=np.exp(0.5 * log_variances),
    )
    return mixture.target("ten components", start={"x": np.zeros(d)}, start_sigma=10.0)


def student_mixture() -> Target:
    """Three Student-t with five degrees of freedom."""
    mixture = Elliptical(
        weights=np.array([0.25, 0.35, 0.4]),
        centres=np.array([[-5.0, 0.0], [4.0, 5.0], [3.0, -4.0]]),
        axes=_rotations([0.3, 1.2, 2.1]),
        scales=np.array([[1.0, 0.5], [1.5, 0.8], [0.7, 1.0]]),
        dof=5.0,
    )
    return mixture.target("Student-t mixture")


# --- curved and skewed densities --------------------------------------------------------------------------------------

BEND, WIDTH = 1.0, 0.5
FUNNEL_SD, FUNNEL_DIM = 3.0, 10


def _log_normal(x: Array, mean: Any, sd: Any) -> Array:
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd) - 0.5 * LOG_2PI


def banana() -> Target:
    """x1 ~ N(0, 1), x2 ~ N(b (x1^2 - 1), s)."""

    def build() -> pm.Model:
        with pm.Model() as model:
            x1 = pm.Normal("x1", 0.0, 1.0)
            pm.Normal("x2", BEND * (x1**2 - 1.0), WIDTH)
        return model

    def sample(n: int, rng: np.random.Generator) -> Array:
        x1, z = rng.standard_normal((2, n))
        return np.column_stack([x1, BEND * (x1**2 - 1.0) + WIDTH * z])

    def log_density(theta: Array) -> Array:
        x1, x2 = theta.T
        return _log_normal(x1, 0.0, 1.0) + _log_normal(x2, BEND * (x1**2 - 1.0), WIDTH)

    return Target("banana", ("x1", "x2"), 2, build, sample, log_density)


def funnel() -> Target:
    """Neal's: v ~ N(0, 3), nine x_i ~ N(0, exp(v / 2))."""

    def build() -> pm.Model:
        with pm.Model() as model:
            v = pm.Normal("v", 0.0, FUNNEL_SD)
            pm.Normal("x", 0.0, pt.exp(0.5 * v), shape=FUNNEL_DIM - 1)
        return model

    def sample(n: int, rng: np.random.Generator) -> Array:
        v = FUNNEL_SD * rng.standard_normal((n, 1))
        return np.hstack([v, np.exp(0.5 * v) * rng.standard_normal((n, FUNNEL_DIM - 1))])

    def log_density(theta: Array) -> Array:
        v, x = theta[:, :1], theta[:, 1:]
        return _log_normal(v[:, 0], 0.0, FUNNEL_SD) + _log_normal(x, 0.0, np.exp(0.5 * v)).sum(axis=1)

    return Target("funnel", ("v", "x"), FUNNEL_DIM, build, sample, log_density)


#: Standardised dose and response of eight units: but for two that are next to each other, a threshold separates them.
DOSES = np.array([-1.6, -1.1, -0.6, -0.1, 0.1, 0.5, 1.0, 1.6])
RESPONSES = np.array([0, 0, 0, 1, 0, 1, 1, 1])
LOGISTIC_PRIOR_SD = 5.0


def _log_likelihood(theta: Array) -> Array:
    signed = (2.0 * RESPONSES - 1.0) * (theta[:, :1] + theta[:, 1:] * DOSES)
    return log_expit(signed).sum(axis=1)


def grid(low: Array, high: Array, n: int) -> tuple[Array, float]:
    """Return the points of a grid in two dimensions, (n^2, 2), and the log of the area of a cell.

    For a smooth density that vanishes at the edges, the sum over the points converges faster than any power of n.
    """
    sides = [np.linspace(a, b, n) for a, b in zip(low, high, strict=True)]
    points = np.stack([side.ravel() for side in np.meshgrid(*sides, indexing="ij")], axis=1)
    return points, float(np.log(np.prod((np.asarray(high) - low) / (n - 1))))


def skewed_logistic() -> Target:
    """Logistic regression on eight observations that are nearly separated; the evidence is by quadrature."""
    points, log_area = grid(np.full(2, -8.0 * LOGISTIC_PRIOR_SD), np.full(2, 8.0 * LOGISTIC_PRIOR_SD), 801)

    def log_joint(theta: Array) -> Array:
        return _log_likelihood(theta) + _log_normal(theta, 0.0, LOGISTIC_PRIOR_SD).sum(axis=1)

    log_z = float(logsumexp(log_joint(points))) + log_area
    # Rejection from the prior: the likelihood is concave, so its largest value on the grid is next to its largest.
    log_bound = _log_likelihood(points).max() + 0.1

    def build() -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, LOGISTIC_PRIOR_SD, shape=2)
            pm.Bernoulli("y", logit_p=beta[0] + beta[1] * DOSES, observed=RESPONSES)
        return model

    def sample(n: int, rng: np.random.Generator) -> Array:
        kept = np.empty((0, 2))
        while len(kept) < n:
            proposed = LOGISTIC_PRIOR_SD * rng.standard_normal((20 * n, 2))
            accepted = np.log(rng.random(len(proposed))) < _log_likelihood(proposed) - log_bound
            kept = np.concatenate([kept, proposed[accepted]])
        return kept[:n]

    return Target("skewed logistic", ("beta",), 2, build, sample, lambda theta: log_joint(theta) - log_z, log_z)


#: By name: functions that make them.
TARGETS: dict[str, Callable[[], Target]] = {
    "two modes": two_modes,
    "ten components": ten_components,
    "Student-t mixture": student_mixture,
    "banana": banana,
    "funnel": funnel,
    "skewed logistic": skewed_logistic,
}


@functools.cache
def target(name: str) -> Target:
    """Return a target by its name."""
    made = TARGETS[name]()
    return replace(made, build=functools.cache(made.build))
