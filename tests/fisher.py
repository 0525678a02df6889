"""Natural gradients of Gaussians and of mixtures by finite differences: nothing of them comes from the package's steps.

The coordinates of a mixture are the natural parameters of each component and the log weights relative to that of the
last one; the Fisher information is that of draw and component together, the covariance of the scores of log(w_c q_c).
"""

import functools

from dataclasses import dataclass, replace

import numpy as np

from matrix import OF_PRECISION, state_of, stored, whitened_moments
from targets import NumpyTarget, random_covariance

from pymc_ngvi.families import MixtureState
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.methods import ComponentTarget


def divergence(mean, cov, other_mean, other_cov):
    """Return KL(N(mean, cov) || N(other_mean, other_cov))."""
    apart = other_mean - mean
    ratio = np.linalg.solve(other_cov, cov)
    return 0.5 * (np.trace(ratio) - np.linalg.slogdet(ratio)[1] - len(mean) + apart @ np.linalg.solve(other_cov, apart))


@dataclass(frozen=True)
class Coordinates:
    """Minimal coordinates of the Gaussians of a family: the mean's part, then the stored entries of one triangle."""

    kind: str
    family: str
    n_dim: int

    @property
    def entries(self):
        """Rows and columns, on and below the diagonal, that the family stores."""
        return np.nonzero(np.tril(stored(self.family, np.ones((self.n_dim, self.n_dim)))))

    @property
    def twice(self):
        """Off-diagonal entries of a symmetric matrix count for two."""
        rows, columns = self.entries
        return np.where(rows == columns, 1.0, 2.0)

    def of(self, mean, cov):
        """Return the coordinates of a Gaussian."""
        if self.kind == "natural":
            precision = np.linalg.inv(cov)
            return np.concatenate([precision @ mean, -0.5 * self.twice * precision[self.entries]])
        root = np.linalg.cholesky(np.linalg.inv(cov) if self.family in OF_PRECISION else cov)
        return np.concatenate([mean, root[self.entries]])

    def gaussian(self, x):
        """Return mean and covariance."""
        first, matrix = x[: self.n_dim], np.zeros((self.n_dim, self.n_dim))
        if self.kind == "factor":
            matrix[self.entries] = x[self.n_dim :]
            product = matrix @ matrix.T
            return first, np.linalg.inv(product) if self.family in OF_PRECISION else product
        matrix[self.entries] = -2.0 * x[self.n_dim :] / self.twice
        cov = np.linalg.inv(matrix + np.tril(matrix, -1).T)
        return cov @ first, cov


def gradient_of(function, x, h=1e-4):
    """Return the gradient by central differences, relative errors about 1e-7."""
    steps = h * np.diag(np.maximum(np.abs(x), 0.1))
    return np.array([function(x + s) - function(x - s) for s in steps]) / (2 * np.diag(steps))


def hessian_of(function, x, h=1e-3):
    """Return the Hessian by central differences of central differences."""
    return np.array(
        [
            (gradient_of(function, x + s, h) - gradient_of(function, x - s, h)) / (2 * s.sum())
            for s in h * np.diag(np.maximum(np.abs(x), 0.1))
        ]
    )


def fisher_information(coordinates, x):
    """Return the Hessian of KL(q_x || q_y) in y at x."""
    here = coordinates.gaussian(x)
    return hessian_of(lambda y: divergence(*here, *coordinates.gaussian(y)), x)


#: Nodes of an expectation in each of so many coordinates: with twice as many, no result changes by more than 2e-6 (in
#: three coordinates, 2e-4).
N_NODES = {1: 64, 2: 44, 3: 30}


@functools.cache
def hermite(n_dim):
    """Return nodes and weights of an expectation under N(0, I), those that count."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(N_NODES[n_dim])
    z = np.stack([axis.ravel() for axis in np.meshgrid(*[nodes] * n_dim, indexing="ij")], axis=1)
    product = functools.reduce(np.multiply.outer, [weights / weights.sum()] * n_dim).ravel()
    counts = product > 1e-14
    return z[counts], product[counts]


@dataclass(frozen=True)
class Exact:
    """ELBO and Fisher information of mixtures of Gaussians.

    Parameters
    ----------
    logp : callable
        Points, (n, n_dim), to (n,).
    family : str
    n_dim, n_components : int
    """

    logp: object
    family: str
    n_dim: int
    n_components: int

    @property
    def coordinates(self):
        """Those of a component."""
        return Coordinates("natural", self.family, self.n_dim)

    def of(self, mixture):
        """Return the coordinates of a mixture."""
        each = [self.coordinates.of(c.mean(), c.cov()) for c in mixture.components]
        return np.concatenate([*each, mixture.log_weights[:-1] - mixture.log_weights[-1]])

    def gaussians(self, x):
        """Return log weights, and mean and covariance of each component."""
        parts = np.split(x[: -(self.n_components - 1)], self.n_components)
        log_odds = np.append(x[-(self.n_components - 1) :], 0.0)
        return log_odds - np.log(np.sum(np.exp(log_odds))), [self.coordinates.gaussian(part) for part in parts]

    def log_terms(self, x, theta):
        """Return log(w_c q_c) at points, (n_components, n)."""
        log_weights, gaussians = self.gaussians(x)
        terms = []
        for log_weight, (mean, cov) in zip(log_weights, gaussians, strict=True):
            square = np.einsum("ni,ni->n", theta - mean, np.linalg.solve(cov, (theta - mean).T).T)
            terms.append(log_weight - 0.5 * (square + np.linalg.slogdet(2 * np.pi * cov)[1]))
        return np.array(terms)

    def points(self, x):
        """Return the nodes of each component with their weights under it."""
        z, weights = hermite(self.n_dim)
        return [(mean + z @ np.linalg.cholesky(cov).T, weights) for mean, cov in self.gaussians(x)[1]]

    def log_ratio(self, x, theta):
        """Return log p - log q."""
        return self.logp(theta) - np.logaddexp.reduce(self.log_terms(x, theta))

    def rewards(self, x):
        """Return E_{q_c}[log p - log q]."""
        return np.array([weights @ self.log_ratio(x, theta) for theta, weights in self.points(x)])

    def elbo(self, x):
        """Return the ELBO of the mixture."""
        return np.exp(self.gaussians(x)[0]) @ self.rewards(x)

    def fisher_information(self, x, *, joint=True):
        """Return that of draw and component, or (``joint`` False) that of the draw alone."""
        total = np.zeros((len(x), len(x)))
        shares = np.exp(self.gaussians(x)[0])
        for c, (theta, weights) in enumerate(self.points(x)):

            def log_density(y, c=c, theta=theta):
                terms = self.log_terms(y, theta)
                return terms[c] if joint else np.logaddexp.reduce(terms)

            scores = derivatives(log_density, x)
            total += shares[c] * (scores * weights) @ scores.T
        return total

    def natural_gradient(self, x, *, joint=True):
        """Return F^-1 times the gradient of the ELBO."""
        return np.linalg.solve(self.fisher_information(x, joint=joint), gradient_of(self.elbo, x))


def derivatives(function, x, h=1e-4):
    """Return those of a function with many values, (n_coordinates, n_values)."""
    steps = h * np.diag(np.maximum(np.abs(x), 0.1))
    return np.array([function(x + s) - function(x - s) for s in steps]) / (2 * np.diag(steps)[:, None])


def mixture(family, n_dim, n_components, seed):
    """Return a mixture whose components differ and overlap, and are not near the best one."""
    rng = np.random.default_rng(seed)
    components = []
    for c in range(n_components):
        mean = 0.8 * (c - (n_components - 1) / 2) + 0.3 * rng.standard_normal(n_dim)
        cov = (0.3 + 0.2 * c) * random_covariance(rng, n_dim, 2.0)
        components.append(state_of(family, mean, cov))
    return MixtureState.of(components, 0.5 * rng.standard_normal(n_components))


@dataclass(frozen=True)
class Case:
    """A target and a mixture, with what is exact of them, and what the package makes of exact expectations."""

    target: NumpyTarget
    q: MixtureState
    family: object

    @functools.cached_property
    def truth(self):
        return Exact(lambda theta: self.target.logp_grad(theta)[0], self.family, self.q.n_dim, self.q.n_components)

    @functools.cached_property
    def x(self):
        """The coordinates of q."""
        return self.truth.of(self.q)

    @functools.cached_property
    def direction(self):
        """F^-1 grad."""
        return self.truth.natural_gradient(self.x)

    @functools.cached_property
    def moments(self):
        """Rewards, and whitened moments of each component."""
        rewards, moments = zip(
            *(component_moments(self.target, self.q, c) for c in range(self.q.n_components)), strict=True
        )
        return np.array(rewards), moments

    @property
    def weight_step(self):
        """What a step of size 1 adds to the log weights, relative to that of the last component."""
        step = self.moments[0]
        return step[:-1] - step[-1]

    @functools.cached_property
    def shifted(self):
        """The same in coordinates that are larger by 10."""
        components = [replace(c, location=c.location + 10.0) for c in self.q.components]
        return Case(Shifted(self.target, 10.0), replace(self.q, components=tuple(components)), self.family)


@functools.cache
def case(make, family, n_dim, n_components, seed=1):
    target = make(n=20, n_dim=n_dim, seed=seed)
    if isinstance(family, tuple):  # no row has predictors of two blocks
        rows, labels = np.arange(20) % 2, np.asarray(family)
        target.design = np.where((labels >= 0) & (labels != rows[:, None]), 0.0, target.design)
        target.pattern = Partition(labels).pattern
    return Case(target, mixture(family, n_dim, n_components, seed), family)


class Shifted(NumpyTarget):
    """Another target in coordinates whose origin lies elsewhere."""

    def __init__(self, inside, shift):
        super().__init__(inside.n_dim)
        self.inside, self.shift = inside, shift

    def logp_grad(self, theta):
        return self.inside.logp_grad(theta - self.shift)

    def _hessians(self, theta):
        return self.inside._hessians(theta - self.shift)


def component_moments(target, q, index):
    """Return reward and whitened moments of a component by quadrature, through the package's own target."""
    component, part = q.components[index], ComponentTarget(target, q, index)
    z, weights = hermite(q.n_dim)
    theta = component.draws(z)
    logp, grad = part.logp_grad(theta)
    # Curvatures are means over draws: those of nodes that are mirror images, and so have one weight.
    labels = np.unique(np.round(np.log(weights), 6), return_inverse=True)[1]
    groups = [labels == label for label in range(labels.max() + 1)]
    curvature = sum(weights[group].sum() * part.mean_hessian(theta[group]).whitened(component) for group in groups)
    return weights @ logp + component.entropy(), whitened_moments(component.whiten(weights @ grad), curvature)


def coupling(truth, x):
    """Return b_c of the page on weights, with derivatives of log p - log q by finite differences."""
    result = []
    for (theta, weights), (mean, cov) in zip(truth.points(x), truth.gaussians(x)[1], strict=True):
        steps = 1e-3 * np.eye(truth.n_dim)

        def gradient(t, steps=steps):
            return np.array([truth.log_ratio(x, t + s) - truth.log_ratio(x, t - s) for s in steps]) / 2e-3

        g = gradient(theta) @ weights
        h = np.array([(gradient(theta + s) - gradient(theta - s)) @ weights for s in steps]) / 2e-3
        result.append(mean @ g + 0.5 * np.sum((cov - np.outer(mean, mean)) * h))
    return np.array(result)
