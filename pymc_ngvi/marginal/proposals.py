"""Proposals for the globals: mixtures of Student t, and coordinates in which skewed margins are normal."""

import itertools

from dataclasses import dataclass, replace

import numpy as np

from scipy.special import gammaln, stdtrit

from pymc_ngvi.core.draws import END, sobol_points
from pymc_ngvi.core.importance import effective_size
from pymc_ngvi.core.linalg import SMALL, TINY, logsumexp, solve_lower
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Indices

# --- mixtures of multivariate Student t distributions ---


@stored("exact.student_mixture")
@dataclass(frozen=True, eq=False)
class StudentMixture:
    """A mixture of multivariate Student t distributions."""

    #: shape (k,).
    shares: Array
    #: shape (k, p).
    means: Array
    #: Lower Cholesky factors of the scale matrices; shape (k, p, p).
    factors: Array
    #: shape (k,).
    df: float | Array

    def log_density(self, x: Array) -> Array:
        """Return the log density at the rows of ``x``."""
        p, df = x.shape[1], self._each_df
        constants = gammaln((df + p) / 2.0) - gammaln(df / 2.0) - 0.5 * p * np.log(df * np.pi)
        constants += np.log(self.shares) - np.log(np.diagonal(self.factors, axis1=1, axis2=2)).sum(axis=1)
        falls = 0.5 * (df + p)[:, None] * np.log1p(squares(self.factors, self.means, x) / df[:, None])
        return logsumexp(constants[:, None] - falls, axis=0)

    def draws(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws, by component.

        The first uniform number of each is one of a randomly shifted grid, which also tells its component; others are
        of a scrambled Sobol sequence. A coordinate given those before is a Student t again [1]_, so that a draw takes
        as many numbers as it has coordinates: of a single one, draws are quantiles.

        References
        ----------
        .. [1] P. Ding (2016). On the conditional distribution of the multivariate t distribution. The American
           Statistician 70(3). https://doi.org/10.1080/00031305.2016.1164756
        """
        p = self.means.shape[1]
        uniform, total = ((np.arange(n) + rng.random()) / n)[:, None], np.cumsum(self.shares)
        which = np.minimum(np.searchsorted(total, uniform[:, 0], side="right"), len(total) - 1)
        uniform = (uniform - (total - self.shares)[which, None]) / self.shares[which, None]
        if p > 1:
            uniform = np.concatenate([uniform, sobol_points(n, p - 1, rng)], axis=1)
        uniform = np.clip(uniform, END, 1.0 - END)
        df, z, square = self._each_df[which], np.empty((n, p)), np.zeros(n)
        for k in range(p):
            z[:, k] = stdtrit(df + k, uniform[:, k]) * np.sqrt((df + square) / (df + k))
            square += z[:, k] ** 2
        return self.means[which] + np.einsum("nij,nj->ni", self.factors[which], z)

    def joined(self, other: "StudentMixture", part: float) -> "StudentMixture":
        """Return a mixture of which a part is another one."""
        shares = np.concatenate([(1.0 - part) * self.shares, part * other.shares])
        means, factors = np.concatenate([self.means, other.means]), np.concatenate([self.factors, other.factors])
        df = np.concatenate([self._each_df, other._each_df])
        return StudentMixture(shares, means, factors, float(df[0]) if (df == df[0]).all() else df)

    @property
    def _each_df(self) -> Array:
        return np.broadcast_to(self.df, len(self.shares))

    def as_one(self) -> "StudentMixture":
        """Return one component with the moments of the mixture."""
        mean = self.shares @ self.means
        apart = self.means - mean
        within = np.einsum("k,kij,klj->il", self.shares, self.factors, self.factors)
        cov = within + (self.shares[:, None] * apart).T @ apart
        return StudentMixture(np.ones(1), mean[None], np.linalg.cholesky(cov)[None], float(self._each_df.min()))

    def scaled(self, scale: float) -> "StudentMixture":
        """Return the mixture with wider components."""
        return StudentMixture(self.shares, self.means, scale * self.factors, self.df)


def squares(factors: Array, means: Array, x: Array) -> Array:
    """Return the squared Mahalanobis lengths of the rows of ``x`` under each of several Gaussians, (k, n)."""
    result = np.empty((len(means), len(x)))
    for k, (factor, mean) in enumerate(zip(factors, means, strict=True)):
        solved = solve_lower(factor, (x - mean).T)
        np.einsum("in,in->n", solved, solved, out=result[k])
    return result


# --- maps between hyperparameters and standard normals ---
#
# Skewed margins of their own tails, tied by a Gaussian copula.
#
# A margin is a sinh-arcsinh distribution [1]_: u = sinh(tail asinh((g - location) / scale) - skewness) is normal.
# From tail = 1, a normal, down to 1/2, an exponential fall, it has the tails of logarithms of scales that may be 0,
# on either side, in as many coordinates as there are.
#
# References
# ----------
# .. [1] M. C. Jones and A. Pewsey (2009). Sinh-arcsinh distributions. Biometrika 96(4).
#    https://doi.org/10.1093/biomet/asp053

#: Where margins are looked for, in standardised coordinates: locations, log scales and skewness; and log tails.
_BOUNDS = (*[(-4.0, 4.0)] * 3, (float(np.log(0.5)), 0.3))
#: Where they shrink to with few draws: log tails, by so many nats below a normal, give or take as much, where log
#: scales begin, too; skewness to 0, give or take 1.
_OF_TAIL = 0.25
_TAIL = -_OF_TAIL
#: Points of a profile, in standard deviations, and of what is interpolated between them; draws that it counts for.
_HALF = np.array([1.0, 2.0, 3.0, 5.0, 8.0, 12.0])
PROFILE = np.concatenate([-_HALF[::-1], [0.0], _HALF])
_N_FINE, _OF_PROFILE = 193, 1_000.0
#: By how much tails are made heavier than they are found, up to those of a normal; all of them together as much as
#: those of so many coordinates.
_HEAVIER, FEW = 0.95, 4.0
#: Steps to the most likely margins; arguments of hyperbolic functions, and nats that a profile falls, at most.
_STEPS, _FARTHEST = 60, 30.0


@stored("exact.margins")
@dataclass(frozen=True, eq=False)
class Margins:
    """A map between coordinates and standard normals."""

    #: Of the margins; shape (p,).
    location: Array
    scale: Array
    skewness: Array
    tail: Array
    #: Of u; shape (p,).
    mean: Array
    #: Lower Cholesky factor of the covariance of u; shape (p, p).
    factor: Array

    @classmethod
    def of_moments(cls, mean: Array, cov: Array) -> "Margins":
        """Return those of a Gaussian."""
        sd, nothing = np.sqrt(np.diag(cov)), np.zeros(len(mean))
        return cls(mean, sd, nothing, nothing + 1.0, nothing, np.linalg.cholesky(cov / np.outer(sd, sd)))

    @classmethod
    def fitted(cls, g: Array, weights: Array, like: "Margins") -> "Margins":
        """Return the most likely margins of weighted draws, (n, p), and the correlations of what these make of them.

        Both shrink, the more so the fewer draws there are.
        """
        p, size = g.shape[1], 1.0 / float(np.sum(weights**2))
        first = cls._apart_from(g, np.tile(weights[:, None], p), size)
        u = first._apart(g)
        centre = weights @ u
        cov = (weights[:, None] * (u - centre)).T @ (u - centre)
        shrunk = p / (p + size)
        sds = np.sqrt(np.diag(cov))
        cov = (1.0 - shrunk) * cov + shrunk * like.correlations * np.outer(sds, sds)
        return replace(first, mean=centre, factor=np.linalg.cholesky(cov))

    @classmethod
    def of_profiles(cls, mode: Array, cov: Array, values: Array) -> "Margins":
        """Return the margins of a log density by its values along the lines of a profile, (n_profile, p)."""
        from scipy.interpolate import PchipInterpolator  # 0.1 s to import

        sd = np.sqrt(np.diag(cov))
        values = np.maximum(np.where(np.isfinite(values), values - values.max(axis=0), -np.inf), -_FARTHEST)
        fine = np.linspace(PROFILE[0], PROFILE[-1], _N_FINE)
        weights = np.exp(PchipInterpolator(PROFILE, values)(fine))
        first = cls._apart_from(mode + fine[:, None] * sd, weights / weights.sum(axis=0), _OF_PROFILE)
        return replace(first, factor=np.linalg.cholesky(cov / np.outer(sd, sd)))

    @classmethod
    def _apart_from(cls, g: Array, weights: Array, size: float) -> "Margins":
        """Return the most likely margins of draws, (n, p), of which each coordinate has weights of its own."""
        from scipy.optimize import minimize  # 0.1 s to import

        p = g.shape[1]
        mean = (weights * g).sum(axis=0)
        sd = np.maximum(np.sqrt((weights * (g - mean) ** 2).sum(axis=0)), TINY)
        begin = np.tile([0.0, _TAIL, 0.0, _TAIL], (p, 1)).T
        lowest, highest = np.array(_BOUNDS).T[:, :, None]
        found = minimize(
            _lack,
            np.clip(begin, lowest, highest).ravel(),
            ((g - mean) / sd, weights, size),
            jac=True,
            method="L-BFGS-B",
            bounds=[bound for bound in _BOUNDS for _ in range(p)],
            options={"maxiter": _STEPS},
        ).x.reshape(-1, p)
        tail = _HEAVIER ** min(1.0, FEW / p) * np.minimum(np.exp(found[3]), 1.0)
        return cls(mean + sd * found[0], sd * np.exp(found[1]), found[2], tail, np.zeros(p), np.eye(p))

    @property
    def correlations(self) -> Array:
        """Of u, (p, p)."""
        cov: Array = self.factor @ self.factor.T
        sd = np.sqrt(np.diag(cov))
        return cov / np.outer(sd, sd)

    def forward(self, g: Array) -> Array:
        """Return the normals of coordinates, (n, p)."""
        return solve_lower(self.factor, np.ascontiguousarray((self._apart(g) - self.mean).T)).T

    def inverse(self, z: Array) -> Array:
        """Return the coordinates of normals, (n, p)."""
        u = self.mean + z @ self.factor.T
        return self.location + self.scale * np.sinh(self._clipped((np.arcsinh(u) + self.skewness) / self.tail))

    def log_slope(self, g: Array) -> Array:
        """Return the log determinants of the derivatives of `forward`, (n,)."""
        h = (g - self.location) / self.scale
        a = self._clipped(self.tail * np.arcsinh(h) - self.skewness)
        each = np.log(np.cosh(a)) - 0.5 * np.log1p(h**2) + np.log(self.tail / self.scale)
        return each.sum(axis=1) - np.log(np.diag(self.factor)).sum()

    def _apart(self, g: Array) -> Array:
        """Return u, (n, p)."""
        a = self.tail * np.arcsinh((g - self.location) / self.scale) - self.skewness
        return np.sinh(self._clipped(a))

    @staticmethod
    def _clipped(a: Array) -> Array:
        return np.clip(a, -_FARTHEST, _FARTHEST)


def profile_lines(mode: Array, cov: Array, at: Array) -> Array:
    """Return points so many sds away along each coordinate, the others following as in a Gaussian, (n, p, p)."""
    return mode + at[:, None, None] * (cov / np.sqrt(np.diag(cov))[:, None])


def _lack(packed: Array, g: Array, weights: Array, size: float) -> tuple[float, Array]:
    """Return minus the mean log density of all margins together, with what they shrink to, and its gradient."""
    location, log_scale, skewness, log_tail = packed.reshape(len(_BOUNDS), -1)
    scale, tail = np.exp(log_scale), np.exp(log_tail)
    h = (g - location) / scale
    arc = np.arcsinh(h)
    a = np.clip(tail * arc - skewness, -_FARTHEST, _FARTHEST)
    u, slope = np.sinh(a), np.cosh(a)
    lack = (weights * (0.5 * u**2 - np.log(slope) + 0.5 * np.log1p(h**2))).sum(axis=0) - log_tail + log_scale
    by_a = u * slope - u / slope
    by_h = by_a * tail / np.sqrt(1.0 + h**2) + h / (1.0 + h**2)
    to_tail = (log_tail - _TAIL) / _OF_TAIL
    lack += (0.5 * skewness**2 + 0.5 * to_tail**2) / size
    gradient = np.stack([
        -(weights * by_h).sum(axis=0) / scale,
        1.0 - (weights * by_h * h).sum(axis=0),
        -(weights * by_a).sum(axis=0) + skewness / size,
        (weights * by_a * tail * arc).sum(axis=0) - 1.0 + to_tail / _OF_TAIL / size,
    ])  # fmt: skip
    return float(lack.sum()), gradient.ravel()


# --- mixtures that fit weighted draws ---

#: Weighted EM: iterations, least share of a component.
_N_EM, _LEAST_SHARE = 12, 0.05
#: Nats below the largest weight from which on draws are left out.
_NO_WEIGHT = 16.0
#: Draws that proposals are fitted to at most.
_MOST_FITTED = 1_500
#: Seed of the folds that proposals are compared by.
_FOLDS = 20_260_303
#: Weighted draws that a component needs, for each coordinate.
_DRAWS_PER_COORDINATE = 6.0
#: The kind that is fitted from given components; the least share of one of these.
_FROM_START, _LEAST_OF_START = (0.0, 0), 0.005
#: Degrees of freedom at least; numbers of components.
LEAST_DF, _COMPONENTS = 7.0, (1, 2, 4)


@stored("exact.proposal")
@dataclass(frozen=True, eq=False)
class Proposal:
    """A density of the globals."""

    #: Of the normals that margins make of the globals.
    mixture: StudentMixture
    margins: Margins

    def log_density(self, g: Array) -> Array:
        """Return the log density at the rows of ``g``."""
        return self.mixture.log_density(self.margins.forward(g)) + self.margins.log_slope(g)

    def draws(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` quasi-random draws."""
        return self.margins.inverse(self.mixture.draws(n, rng))


def _few(weights: Array, n: int) -> tuple[Indices, Array]:
    """Return the rows that have weight, and weights that add up to 1; of more than ``n``, some, evenly by weight."""
    rows = np.flatnonzero(weights > np.exp(-_NO_WEIGHT) * weights.max())
    w = weights[rows] / weights[rows].sum()
    if len(rows) <= n:
        return rows, w
    picked = np.minimum(np.searchsorted(np.cumsum(w), (np.arange(n) + 0.5) / n), len(w) - 1)
    which, counts = np.unique(picked, return_counts=True)
    return rows[which], counts / n


def mixture_of(means: Array, factors: Array, df: float) -> StudentMixture:
    """Return components of the same shares."""
    return StudentMixture(np.full(len(means), 1.0 / len(means)), means, factors, df)


def tempered(log_weights: Array, least: float) -> Array:
    """Return weights to a power, at most 1, with which the effective size is ``least``, as far as that can be had."""
    power = 1.0
    while effective_size(power * log_weights) < least and power > 0.05:
        power *= 0.8
    return power * log_weights


def best_proposal(
    g: Array,
    log_weights: Array,
    log_marginal: Array,
    margins: Margins,
    df: float,
    start: StudentMixture | None = None,
) -> Proposal:
    """Return the proposal of several kinds that does best on draws it was not fitted to.

    Notes
    -----
    Kinds differ in tails and in the number of components. The score is an estimate, from held-out draws in two folds,
    of the logarithm of E_p[p / q], whose inverse is the efficiency.
    """
    rows, w = _few(np.exp(log_weights - log_weights.max()), _MOST_FITTED)
    g, log_marginal = g[rows], log_marginal[rows]
    y = margins.forward(g)
    # At random: every second point of a Sobol sequence is in one half of the space.
    fold = np.random.default_rng(_FOLDS).permutation(len(g)) % 2
    size = 1.0 / (w**2).sum()
    enough = [k for k in _COMPONENTS if k == 1 or size > _DRAWS_PER_COORDINATE * k * y.shape[1]]

    def make(kind: tuple[float, int], rows: Array) -> Proposal:
        part = w[rows] / w[rows].sum()
        if kind == _FROM_START and start is not None:
            return Proposal(_by_em(y[rows], part, start, None, _LEAST_OF_START), margins)
        return Proposal(_fitted(y[rows], part, *kind), margins)

    def score(kind: tuple[float, int]) -> float:
        total = 0.0
        for f in (0, 1):
            fitted, held = fold != f, (fold == f) & (w > 0.0) & np.isfinite(log_marginal)
            if (w[fitted] > 0.0).sum() < 5 or not held.any():
                return -np.inf
            log_q = make(kind, fitted).log_density(g[held])
            part = w[held] / w[held].sum()
            total -= float(logsumexp(np.log(part) + log_marginal[held] - log_q))
        return total

    kinds = [*itertools.product(sorted({df, LEAST_DF}), enough), *([] if start is None else [_FROM_START])]
    return make(max(kinds, key=score), np.ones(len(g), dtype=bool))


def _fitted(y: Array, w: Array, df: float, k: int) -> StudentMixture:
    mean, cov = _shrunk_moments(y, w)
    root = np.linalg.cholesky(cov)
    if k == 1:
        return mixture_of(mean[None], np.sqrt((df - 2.0) / df) * root[None], df)
    # Components begin along the direction of most skewness.
    skewness = w @ solve_lower(root, np.ascontiguousarray((y - mean).T)).T ** 3
    direction = root @ (skewness / (np.linalg.norm(skewness) + TINY))
    means = mean + np.linspace(-1.0, 1.0, k)[:, None] * direction
    start = mixture_of(means, np.broadcast_to(np.sqrt(0.7) * root, (k, *root.shape)), df)
    return _by_em(y, w, start, (mean, cov), _LEAST_SHARE)


def _shrunk_moments(y: Array, w: Array) -> tuple[Array, Array]:
    """Return weighted moments, but 1 for variances within the noise of so few draws [1]_: margins have made them so.

    References
    ----------
    .. [1] J. Baik, G. Ben Arous, S. Peche (2005). Phase transition of the largest eigenvalue for nonnull complex sample
       covariance matrices. Annals of Probability 33(5). https://doi.org/10.1214/009117905000000233
    """
    p, size, mean = y.shape[1], 1.0 / (w**2).sum(), w @ y
    apart = y - mean
    cov = (w[:, None] * apart).T @ apart
    values, vectors = np.linalg.eigh(cov)
    edge = np.sqrt(p / size)
    outside = (values > (1.0 + edge) ** 2) | (values < max(0.0, 1.0 - edge) ** 2)
    cov = (vectors * np.where(outside, np.maximum(values, SMALL), 1.0)) @ vectors.T
    return mean * (mean @ mean) / (mean @ mean + p / size), cov


def _by_em(
    y: Array, w: Array, start: StudentMixture, towards: tuple[Array, Array] | None, least: float
) -> StudentMixture:
    """Fit the components of a mixture by weighted EM; they shrink towards these moments, or what they were."""
    shares, means, factors, p = start.shares, start.means, start.factors, y.shape[1]
    df = np.broadcast_to(start.df, len(shares))[:, None]
    for _ in range(_N_EM):
        # The part of the weight of each draw that each component has, and the weights of a t of each, (k, n).
        square = squares(factors, means, y)
        log_dets = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
        log_parts = (np.log(shares) - log_dets)[:, None] - 0.5 * (df + p) * np.log1p(square / df)
        parts = np.exp(log_parts - log_parts.max(axis=0))
        responsibilities = parts * (w / parts.sum(axis=0))
        weight, total = responsibilities * ((df + p) / (df + square)), responsibilities.sum(axis=1)
        shares = np.maximum(total, least)
        shares /= shares.sum()
        # Locations and scales from their draws, shrunk by as much as these are few.
        to_mean, to_cov = (means, factors @ factors.transpose(0, 2, 1)) if towards is None else towards
        locations = (weight @ y) / np.maximum(weight.sum(axis=1), TINY)[:, None]
        apart = y - locations[:, None]
        sizes = total**2 / np.maximum((responsibilities**2).sum(axis=1), TINY)
        of_cov, of_mean = (2.0 * p / (2.0 * p + sizes))[:, None, None], (1.0 / (1.0 + 0.2 * sizes))[:, None]
        scatters = (weight[:, :, None] * apart).transpose(0, 2, 1) @ apart / np.maximum(total, TINY)[:, None, None]
        means = (1.0 - of_mean) * locations + of_mean * to_mean
        factors = np.linalg.cholesky((1.0 - of_cov) * scatters + of_cov * to_cov)
    return StudentMixture(shares, means, factors, start.df)
