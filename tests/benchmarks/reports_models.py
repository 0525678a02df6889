"""Twenty-five likelihoods in small multilevel models, and what is known of each without the package.

Groups of few rows have an effect each; intercept, slope, the effects' scale and what else a likelihood has are unknown.
Effects are integrated on a grid, all else by importance sampling from a Student t about the mode, with scrambled Sobol
points. Errors are told by independent scramblings.
"""

import functools

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

from scipy import optimize, stats
from scipy.special import expit, gammaln, log_expit, log_ndtr, logsumexp, ndtr, owens_t
from scipy.stats import qmc

from pymc_ngvi.core.types import Array

N_GROUPS, N_OF_GROUP, TRIALS = 8, 6, 8
LABELS = [f"g{k}" for k in range(N_GROUPS)]
#: New rows: of known groups, and of one that was not in the fit. Rows that are predicted: one of each.
NEW_GROUPS, PREDICTED = np.array([0, 0, 3, 8, 8, 8]), (np.array([0, 8]), np.array([1.0, -1.0]))
#: Standardised effects.
Z = np.linspace(-7.0, 7.0, 85)
LOG_Z = stats.norm.logpdf(Z) + np.log(Z[1] - Z[0])
N_SCRAMBLED, N_POINTS, AT_ONCE = 16, 1_024, 128
DF, WIDER, ENOUGH = 5.0, 1.2, 0.1
#: In the place of the log of 0; of linear predictors.
LEAST, MOST = -1e6, 30.0


class Prior(NamedTuple):
    """The prior of an unknown: by PyMC, by SciPy, and from the real line to its values, with the log derivative."""

    build: Callable[..., Any]
    law: Any
    values: Callable[[Array], Array]
    log_slope: Callable[[Array], Array]
    #: With which data are simulated.
    true: float


def normal(sd, true):
    return Prior(lambda name: pm.Normal(name, 0.0, sd), stats.norm(0.0, sd), lambda t: t, np.zeros_like, true)


def half_normal(sd, true):
    return Prior(lambda name: pm.HalfNormal(name, sd), stats.halfnorm(scale=sd), np.exp, lambda t: t, true)


def gamma(alpha, beta, true):
    law = stats.gamma(alpha, scale=1.0 / beta)
    return Prior(lambda name: pm.Gamma(name, alpha, beta), law, np.exp, lambda t: t, true)


def share(alpha, beta, true):
    law = stats.beta(alpha, beta)
    return Prior(
        lambda name: pm.Beta(name, alpha, beta), law, expit, lambda t: log_expit(t) + log_expit(-t), true
    )  # fmt: skip


class Law(NamedTuple):
    """A distribution that SciPy has not, or not as fast."""

    logpdf: Callable[[Array], Array]
    cdf: Callable[[Array], Array]
    rvs: Callable[..., Array]


def below(logpmf):
    """The distribution function of a count."""
    return lambda y: sum(np.exp(logpmf(float(k))) for k in range(int(np.max(y)) + 1))


def poisson_logpmf(y, eta):
    return y * eta - np.exp(eta) - gammaln(y + 1.0)


def zero_inflated(eta, psi):
    def logpmf(y):
        of_count = np.log(psi) + poisson_logpmf(y, eta)
        return np.where(y == 0, np.logaddexp(np.log1p(-psi), of_count), of_count)

    def rvs(random_state):
        return random_state.poisson(np.exp(eta)) * (random_state.random(eta.shape) < psi)

    return Law(logpmf, below(logpmf), rvs)


def hurdle(eta, psi):
    def logpmf(y):
        beyond = np.log(psi) + poisson_logpmf(y, eta) - np.log(-np.expm1(-np.exp(eta)))
        return np.where(y == 0, np.log1p(-psi), beyond)

    def rvs(random_state):
        count = stats.poisson.ppf(random_state.uniform(np.exp(-np.exp(eta)), 1.0), np.exp(eta))
        return (count * (random_state.random(eta.shape) < psi)).astype(int)

    return Law(logpmf, below(logpmf), rvs)


def beta_binomial(eta, phi):
    a, b = expit(eta) * phi, expit(-eta) * phi

    def logpmf(y):
        of_trials = gammaln(TRIALS + 1.0) - gammaln(y + 1.0) - gammaln(TRIALS - y + 1.0)
        beta = gammaln(y + a) + gammaln(TRIALS - y + b) - gammaln(TRIALS + phi)
        return of_trials + beta - gammaln(a) - gammaln(b) + gammaln(phi)

    return Law(logpmf, below(logpmf), lambda random_state: random_state.binomial(TRIALS, random_state.beta(a, b)))


def classes(log_p):
    """One of few classes; log probabilities of each."""

    def logpmf(y):
        return sum((np.asarray(y) == k) * of_class for k, of_class in enumerate(log_p))

    def rvs(random_state):
        u = random_state.random(log_p[0].shape)
        return sum((u > total).astype(int) for total in np.cumsum(np.exp(log_p), axis=0)[:-1])

    return Law(logpmf, below(logpmf), rvs)


def ordered(eta, first, gap):
    below_second = first + gap - eta
    middle = log_expit(below_second) + log_expit(eta - first) + np.log(-np.expm1(-gap))
    return classes([log_expit(first - eta), middle, log_expit(-below_second)])


def categorical(eta, second):
    total = np.logaddexp(np.logaddexp(0.0, eta), second)
    return classes([-total, eta - total, second - total])


def censored(eta, s):
    def logpdf(y):
        return np.where(y >= 1.0, log_ndtr((eta - 1.0) / s), stats.norm.logpdf(y, eta, s))

    def cdf(y):
        return np.where(y >= 1.0, 1.0, ndtr((y - eta) / s))

    return Law(logpdf, cdf, lambda random_state: np.minimum(random_state.normal(eta, s), 1.0))


def truncated(eta, s):
    def cdf(y):
        return -np.expm1(log_ndtr((eta - y) / s) - log_ndtr(eta / s))

    return Law(
        lambda y: stats.norm.logpdf(y, eta, s) - log_ndtr(eta / s),
        cdf,
        lambda random_state: stats.truncnorm.rvs(-eta / s, np.inf, eta, s, random_state=random_state),
    )


def skewed(eta, s, alpha):
    """A skew normal: SciPy's distribution function takes quadrature."""

    def logpdf(y):
        z = (y - eta) / s
        return np.log(2.0) + stats.norm.logpdf(z) - np.log(s) + log_ndtr(alpha * z)

    def cdf(y):
        return ndtr((y - eta) / s) - 2.0 * owens_t((y - eta) / s, alpha)

    return Law(logpdf, cdf, lambda random_state: stats.skewnorm.rvs(alpha, eta, s, random_state=random_state))


def two_normals(eta, m, s, s2, r):
    """Of the first, with the mean eta, and a second one that depends on it."""
    slope, rest = r * s2 / s, s2 * np.sqrt(1.0 - r**2)

    def logpdf(y):
        return stats.norm.logpdf(y[0], eta, s) + stats.norm.logpdf(y[1], m + slope * (y[0] - eta), rest)

    def rvs(random_state):
        first = random_state.normal(eta, s)
        return np.stack([first, random_state.normal(m + slope * (first - eta), rest)], axis=-1)

    return Law(logpdf, lambda y: ndtr((y - eta) / s), rvs)


def correlation(true):
    """LKJ(2) of two variables: a beta distribution on (-1, 1)."""
    law = stats.beta(2.0, 2.0, loc=-1.0, scale=2.0)
    return Prior(None, law, np.tanh, lambda t: -2.0 * np.log(np.cosh(t)), true)  # type: ignore[arg-type]


def _pairs(eta, p, y):
    sds = pm.HalfNormal.dist(1.0, shape=2)
    factor, *_ = pm.LKJCholeskyCov("factor", n=2, eta=2.0, sd_dist=sds)
    pm.MvNormal("y", pm.math.stack([eta, p.m + 0.0 * eta], axis=1), chol=factor, observed=y)


def _ordered(eta, p, y):
    pm.OrderedLogistic("y", eta, pm.math.stack([p.first, p.first + p.gap]), compute_p=False, observed=y)


def _categorical(eta, p, y):
    logits = pm.math.stack([0.0 * eta, eta, p.second + 0.0 * eta], axis=1)
    pm.Categorical("y", logit_p=logits, observed=y)


class Likelihood(NamedTuple):
    """A likelihood: its unknowns, what PyMC calls it, and its law given linear predictors."""

    unknowns: Mapping[str, Prior]
    observe: Callable[[Any, SimpleNamespace, Any], object]
    law: Callable[..., Any]
    #: Beside which an intercept would be one too many.
    has_intercept: bool = True


SD = half_normal(1.0, 0.6)
exp, sigmoid = pm.math.exp, pm.math.sigmoid
LIKELIHOODS = {
    "Normal": Likelihood({"s": SD}, lambda e, p, y: pm.Normal("y", e, p.s, observed=y), stats.norm),
    "StudentT": Likelihood(
        {"s": SD, "nu": gamma(2.0, 0.1, 4.0)},
        lambda e, p, y: pm.StudentT("y", nu=p.nu, mu=e, sigma=p.s, observed=y),
        lambda e, s, nu: stats.t(nu, e, s),
    ),
    "Laplace": Likelihood({"s": SD}, lambda e, p, y: pm.Laplace("y", e, p.s, observed=y), stats.laplace),
    "Logistic": Likelihood({"s": SD}, lambda e, p, y: pm.Logistic("y", e, p.s, observed=y), stats.logistic),
    "SkewNormal": Likelihood(
        {"s": SD, "alpha": normal(3.0, 3.0)},
        lambda e, p, y: pm.SkewNormal("y", mu=e, sigma=p.s, alpha=p.alpha, observed=y),
        skewed,
    ),
    "LogNormal": Likelihood(
        {"s": SD}, lambda e, p, y: pm.LogNormal("y", e, p.s, observed=y), lambda e, s: stats.lognorm(s, scale=np.exp(e))
    ),
    "Gamma": Likelihood(
        {"k": gamma(2.0, 0.5, 2.0)},
        lambda e, p, y: pm.Gamma("y", alpha=p.k, beta=p.k * exp(-e), observed=y),
        lambda e, k: stats.gamma(k, scale=np.exp(e) / k),
    ),
    "InverseGamma": Likelihood(
        {"k": gamma(2.0, 0.5, 3.0)},
        lambda e, p, y: pm.InverseGamma("y", alpha=p.k, beta=p.k * exp(e), observed=y),
        lambda e, k: stats.invgamma(k, scale=k * np.exp(e)),
    ),
    "Exponential": Likelihood(
        {}, lambda e, p, y: pm.Exponential("y", exp(-e), observed=y), lambda e: stats.expon(scale=np.exp(e))
    ),
    "Weibull": Likelihood(
        {"k": gamma(2.0, 1.0, 1.7)},
        lambda e, p, y: pm.Weibull("y", p.k, exp(e), observed=y),
        lambda e, k: stats.weibull_min(k, scale=np.exp(e)),
    ),
    "Beta": Likelihood(
        {"phi": gamma(2.0, 0.1, 8.0)},
        lambda e, p, y: pm.Beta("y", alpha=sigmoid(e) * p.phi, beta=sigmoid(-e) * p.phi, observed=y),
        lambda e, phi: stats.beta(expit(e) * phi, expit(-e) * phi),
    ),
    "HalfNormal": Likelihood(
        {}, lambda e, p, y: pm.HalfNormal("y", exp(e), observed=y), lambda e: stats.halfnorm(scale=np.exp(e))
    ),
    "Poisson": Likelihood(
        {}, lambda e, p, y: pm.Poisson("y", exp(e), observed=y), lambda e: stats.poisson(np.exp(e))
    ),
    "NegativeBinomial": Likelihood(
        {"phi": gamma(2.0, 0.5, 2.0)},
        lambda e, p, y: pm.NegativeBinomial("y", mu=exp(e), alpha=p.phi, observed=y),
        lambda e, phi: stats.nbinom(phi, phi / (phi + np.exp(e))),
    ),
    "ZeroInflatedPoisson": Likelihood(
        {"psi": share(2.0, 2.0, 0.7)},
        lambda e, p, y: pm.ZeroInflatedPoisson("y", psi=p.psi, mu=exp(e), observed=y),
        zero_inflated,
    ),
    "HurdlePoisson": Likelihood(
        {"psi": share(2.0, 2.0, 0.7)}, lambda e, p, y: pm.HurdlePoisson("y", psi=p.psi, mu=exp(e), observed=y), hurdle
    ),
    "Bernoulli": Likelihood(
        {}, lambda e, p, y: pm.Bernoulli("y", logit_p=e, observed=y), lambda e: stats.bernoulli(expit(e))
    ),
    "Binomial": Likelihood(
        {}, lambda e, p, y: pm.Binomial("y", TRIALS, logit_p=e, observed=y), lambda e: stats.binom(TRIALS, expit(e))
    ),
    "BetaBinomial": Likelihood(
        {"phi": gamma(2.0, 0.2, 5.0)},
        lambda e, p, y: pm.BetaBinomial(
            "y", n=TRIALS, alpha=sigmoid(e) * p.phi, beta=sigmoid(-e) * p.phi, observed=y
        ),
        beta_binomial,
    ),
    "Geometric": Likelihood(
        {}, lambda e, p, y: pm.Geometric("y", sigmoid(e), observed=y), lambda e: stats.geom(expit(e))
    ),
    "OrderedLogistic": Likelihood(
        {"first": normal(2.0, -0.5), "gap": half_normal(3.0, 1.5)}, _ordered, ordered, has_intercept=False
    ),
    "Categorical": Likelihood({"second": normal(1.5, 0.3)}, _categorical, categorical),
    "truncated Normal": Likelihood(
        {"s": SD},
        lambda e, p, y: pm.Truncated("y", pm.Normal.dist(e, p.s), lower=0.0, upper=None, observed=y),
        truncated,
    ),
    "censored Normal": Likelihood(
        {"s": SD},
        lambda e, p, y: pm.Censored("y", pm.Normal.dist(e, p.s), lower=None, upper=1.0, observed=y),
        censored,
    ),
    "MvNormal": Likelihood(
        {"m": normal(1.5, 0.5), "s": half_normal(1.0, 0.6), "s2": half_normal(1.0, 0.8), "r": correlation(0.5)},
        _pairs,
        two_normals,
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Known:
    """What is known: each with its standard error, in the same shape."""

    rows: tuple[Array, Array]
    groups: tuple[Array, Array]
    #: Log predictive density of the new rows given those of the fit.
    new_rows: tuple[Array, Array]
    #: Means and sds of slope, log scale and effects of the groups with new rows, given these as well.
    updated: tuple[Array, Array]
    #: Means and sds of the linear predictors of the rows that are predicted.
    predictors: tuple[Array, Array]
    #: Probabilities that these rows are at most a threshold each.
    shares: tuple[Array, Array]


class Problem:
    """Data of a likelihood, simulated from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.likelihood = LIKELIHOODS[name]
        a, b, tau = normal(1.5, 0.4), normal(1.0, 0.5), half_normal(1.0, 0.7)
        self.priors = {**({"a": a} if self.likelihood.has_intercept else {}), "b": b, "tau": tau}
        self.priors |= self.likelihood.unknowns
        rng = np.random.default_rng(seed)
        fitted = np.repeat(np.arange(N_GROUPS), N_OF_GROUP)
        self.n, group = len(fitted), np.concatenate([fitted, NEW_GROUPS])
        self.group, self.x = group, rng.normal(size=len(group))
        effect = tau.true * rng.standard_normal(N_GROUPS + 1)
        eta = a.true * self.likelihood.has_intercept + b.true * self.x + effect[group]
        y = self._law(eta, {key: prior.true for key, prior in self.priors.items()}).rvs(random_state=rng)
        self.y = y
        first = y if y.ndim == 1 else y[:, 0]
        self.thresholds = np.quantile(first, [0.1, 0.5, 0.9], method="lower")

    def _law(self, eta, values):
        return self.likelihood.law(eta, *(values[key] for key in self.likelihood.unknowns))

    def model(self) -> pm.Model:
        """The model of the rows that are fitted."""
        with pm.Model(coords={"group": LABELS}) as model:
            index, x = pm.Data("index", self.group[: self.n]), pm.Data("x", self.x[: self.n])
            p = SimpleNamespace(**{key: of.build(key) for key, of in self.priors.items() if self._is_built(key)})
            u = pm.Normal("u", 0.0, p.tau, dims="group")
            eta = pm.Deterministic("eta", getattr(p, "a", 0.0) + p.b * x + u[index])
            self.likelihood.observe(eta, p, self.y[: self.n])
        return model

    def _is_built(self, key):
        return self.likelihood.observe is not _pairs or key not in ("s", "s2", "r")

    def new_rows(self) -> dict[str, Any]:
        """The new rows, as `update` takes them."""
        labels = [*LABELS, "another"]
        index = [labels[k] for k in self.group[self.n :]]
        return {"index": index, "x": self.x[self.n :], "y": self.y[self.n :]}

    # --- integrals ---

    def _evaluated(self, theta: Array) -> dict[str, Array]:
        """Return log p with effects integrated, and what else there is to know, at each draw of all else."""
        n, values = self.n, {}
        log_p = np.zeros(len(theta))
        for at, (key, prior) in zip(theta.T, self.priors.items(), strict=True):
            values[key] = prior.values(at)
            log_p = log_p + prior.law.logpdf(values[key]) + prior.log_slope(at)
        each = {key: of[:, None, None] for key, of in values.items()}
        fixed = each.get("a", 0.0) + each["b"] * self.x[:, None]
        with np.errstate(all="ignore"):
            law = self._law(np.clip(fixed + each["tau"] * Z, -MOST, MOST), each)
            logpdf = law.logpdf if hasattr(law, "logpdf") else law.logpmf
            rows = np.nan_to_num(np.maximum(logpdf(self.y.T[..., None]), LEAST), nan=LEAST)
        one_hot = np.equal.outer(np.arange(N_GROUPS + 1), self.group).astype(float)
        old, new = (np.einsum("gn,snk->sgk", one_hot[:, k], rows[:, k]) for k in (slice(n), slice(n, None)))
        before = logsumexp(old + LOG_Z, axis=2)
        after = logsumexp(old + new + LOG_Z, axis=2)
        without = logsumexp(old[:, self.group[:n]] - rows[:, :n] + LOG_Z, axis=2)
        of_groups, at = PREDICTED
        p_before, p_after = np.exp(old + LOG_Z - before[..., None]), np.exp(old + new + LOG_Z - after[..., None])
        eta = np.clip(each.get("a", 0.0) + each["b"] * at[:, None] + each["tau"] * Z, -MOST, MOST)
        law, p = self._law(eta, each), p_before[:, of_groups]
        with np.errstate(all="ignore"):
            shares = np.stack([np.sum(p * law.cdf(np.asarray(c)), axis=2) for c in self.thresholds], axis=2)
        touched, powers = np.unique(NEW_GROUPS), np.array([[1], [2]])
        of_globals = np.stack([values["b"], np.log(values["tau"])], axis=1)[:, None] ** powers
        of_effects = np.stack([p_after[:, touched] @ (Z**k) * values["tau"][:, None] ** k for k in (1, 2)], axis=1)
        return {
            "log_p": log_p + before.sum(axis=1),
            "rows": before[:, self.group[:n]] - without,
            "groups": before[:, :N_GROUPS],
            "new_rows": (after - before).sum(axis=1),
            "updated": np.concatenate([of_globals, of_effects], axis=2),
            "predictors": np.stack([np.sum(p * eta**k, axis=2) for k in (1, 2)], axis=1),
            "shares": shares,
        }

    def evaluated(self, theta: Array) -> dict[str, Array]:
        parts = [self._evaluated(theta[i : i + AT_ONCE]) for i in range(0, len(theta), AT_ONCE)]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    @functools.cached_property
    def proposal(self) -> tuple[Array, Array]:
        """Mean and covariance: about the mode at first, then of draws by powers of their weights."""
        found = optimize.minimize(
            lambda t: -self._evaluated(t[None])["log_p"][0], np.zeros(len(self.priors)), method="BFGS"
        )
        mean, cov = found.x, found.hess_inv + 0.2**2 * np.eye(len(found.x))
        for k in range(4):
            theta, log_q = _points(mean, WIDER**2 * cov, N_POINTS, k)
            log_weights, power = self.evaluated(theta)["log_p"] - log_q, 1.0
            while _worth(power * log_weights) < ENOUGH * N_POINTS:
                power *= 0.8
            w = np.exp(power * log_weights - logsumexp(power * log_weights))
            mean = w @ theta
            cov = (theta - mean).T @ (w[:, None] * (theta - mean))
        return mean, WIDER**2 * cov

    def known(self, n_scrambled: int = N_SCRAMBLED, n_points: int = N_POINTS) -> Known:
        """Return what is known."""
        found = []
        for k in range(n_scrambled):
            theta, log_q = _points(*self.proposal, n_points, 100 + k)
            found.append(self.evaluated(theta) | {"log_q": log_q})
        whole = {key: np.concatenate([one[key] for one in found]) for key in found[0]}
        if _worth(whole["log_p"] - whole["log_q"]) < ENOUGH * len(whole["log_p"]):
            raise ValueError("There are too few points where the posterior is.")
        value, each = _known(whole), [_known(one) for one in found]
        errors = {key: np.std([one[key] for one in each], axis=0) / np.sqrt(n_scrambled) for key in value}
        return Known(**{key: (value[key], errors[key]) for key in value})


def _worth(log_weights: Array) -> float:
    """Return how many points of equal weight weighted ones are worth."""
    return float(np.exp(2.0 * logsumexp(log_weights) - logsumexp(2.0 * log_weights)))


def _points(mean: Array, cov: Array, n: int, seed: int) -> tuple[Array, Array]:
    """Return points of a Student t, and its log density there."""
    d = len(mean)
    u = np.clip(qmc.Sobol(d + 1, rng=np.random.default_rng(seed)).random(n), 1e-12, 1.0 - 1e-12)
    scale = np.sqrt(stats.chi2.ppf(u[:, -1:], DF) / DF)
    theta = mean + stats.norm.ppf(u[:, :-1]) / scale @ np.linalg.cholesky(cov).T
    return theta, stats.multivariate_t(mean, cov, DF).logpdf(theta)


def _known(of: dict[str, Array]) -> dict[str, Array]:
    log_weights = of["log_p"] - of["log_q"]
    total = logsumexp(log_weights)
    with_new = np.exp(log_weights + of["new_rows"] - logsumexp(log_weights + of["new_rows"]))
    weights = np.exp(log_weights - total)
    return {
        "rows": total - logsumexp(log_weights[:, None] - of["rows"], axis=0),
        "groups": total - logsumexp(log_weights[:, None] - of["groups"], axis=0),
        "new_rows": logsumexp(log_weights + of["new_rows"]) - total,
        "updated": _moments(np.tensordot(with_new, of["updated"], 1)),
        "predictors": _moments(np.tensordot(weights, of["predictors"], 1)),
        "shares": np.tensordot(weights, of["shares"], 1),
    }


def _moments(of: Array) -> Array:
    """Return means and sds from means of a variable and its square."""
    return np.stack([of[0], np.sqrt(np.maximum(of[1] - of[0] ** 2, 0.0))])
