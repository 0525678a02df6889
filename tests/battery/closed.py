"""Models whose posterior is known in closed form or by one sum: name -> (model, what is known, least kind)."""

import numpy as np
import pymc as pm

from scipy import stats
from scipy.special import betaln, gammaln, logsumexp

GAUSSIAN, APPROXIMATE, EXACT = range(3)
_LIMITS = (0.05, 0.95)


def _of(law):
    """Moments and limits of a law of SciPy's."""
    return law.mean(), law.std(), *law.ppf(_LIMITS)


def of_grid(values, weights):
    """Moments and limits of a variable on an even grid, from weights that need not sum to 1."""
    weights = weights / weights.sum()
    mean = weights @ values
    low, high = np.interp(_LIMITS, np.cumsum(weights) - 0.5 * weights, values)
    return mean, np.sqrt(weights @ (values - mean) ** 2), low, high


def beta_binomial():
    with pm.Model() as model:
        p = pm.Beta("p", 2.0, 3.0)
        pm.Deterministic("odds", p / (1.0 - p))
        pm.Binomial("y", 12, p, observed=9)
    return model


def _beta_binomial():
    a, b = 11.0, 6.0
    evidence = betaln(a, b) - betaln(2.0, 3.0) + gammaln(13) - gammaln(10) - gammaln(4)
    return {"moments": {"p": _of(stats.beta(a, b)), "odds": _of(stats.betaprime(a, b))}, "evidence": (evidence, 0.0)}


COUNTS = np.array([3, 0, 2, 1, 4, 2, 2])


def gamma_poisson():
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 0.5)
        pm.Poisson("y", rate, observed=COUNTS)
    return model


def _gamma_poisson():
    n, total = len(COUNTS), COUNTS.sum()
    evidence = (
        2.0 * np.log(0.5) - gammaln(2.0) + gammaln(2.0 + total) - (2.0 + total) * np.log(0.5 + n)
        - gammaln(COUNTS + 1).sum()
    )  # fmt: skip
    return {"moments": {"rate": _of(stats.gamma(2.0 + total, scale=1.0 / (0.5 + n)))}, "evidence": (evidence, 0.0)}


def line_data():
    rng = np.random.default_rng(61)
    x = np.column_stack([np.ones(40), rng.normal(size=(40, 2))])
    return x, x @ [0.5, 1.0, -0.7] + rng.normal(0.0, 0.8, 40)


def line():
    """A linear regression with known noise: the posterior is Gaussian."""
    x, y = line_data()
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        pm.Deterministic("mu", x[:4] @ beta)
        pm.Normal("y", x @ beta, 0.8, observed=y)
    return model


def normal_posterior(x, y, prior_sd, noise):
    """Mean and covariance of coefficients with independent normal priors about 0, and the log marginal likelihood."""
    prior = np.broadcast_to(prior_sd, x.shape[1]) ** 2.0
    covariance = np.linalg.inv(x.T @ x / noise**2 + np.diag(1.0 / prior))
    of_y = stats.multivariate_normal(np.zeros(len(y)), (x * prior) @ x.T + noise**2 * np.eye(len(y)))
    return covariance @ x.T @ y / noise**2, covariance, of_y.logpdf(y)


def normal_moments(mean, covariance):
    """Moments and limits of the elements of a normal vector."""
    sd = np.sqrt(np.diag(covariance))
    return mean, sd, *(mean + z * sd for z in stats.norm.ppf(_LIMITS))


def _line():
    x, y = line_data()
    mean, covariance, evidence = normal_posterior(x, y, 2.0, 0.8)
    moments = {
        "beta": normal_moments(mean, covariance),
        "mu": normal_moments(x[:4] @ mean, x[:4] @ covariance @ x[:4].T),
    }
    return {"moments": moments, "evidence": (evidence, 0.0)}


def scale():
    with pm.Model() as model:
        mu, sigma = pm.Normal("mu", 0.0, 3.0), pm.HalfCauchy("sigma", 1.0)
        pm.Normal("y", mu, sigma, observed=[1.2, -0.3, 2.2, 0.9])
    return model


def _scale():
    y, log_sigma, mu = np.array([1.2, -0.3, 2.2, 0.9]), np.linspace(-8.0, 9.0, 851), np.linspace(-14.0, 14.0, 1_401)
    sigma = np.exp(log_sigma)
    log_p = stats.norm.logpdf(mu[:, None], 0.0, 3.0) + stats.halfcauchy.logpdf(sigma) + log_sigma
    log_p = log_p + sum(stats.norm.logpdf(v, mu[:, None], sigma) for v in y)
    p = np.exp(log_p - log_p.max())
    evidence = logsumexp(log_p) + np.log((mu[1] - mu[0]) * (log_sigma[1] - log_sigma[0]))
    _, _, *limits = of_grid(log_sigma, p.sum(axis=0))
    moments = {"mu": of_grid(mu, p.sum(axis=1)), "sigma": (np.nan, np.nan, *np.exp(limits))}
    return {"moments": moments, "evidence": (evidence, 0.0)}


SWITCH = np.random.default_rng(1).poisson(np.where(np.arange(60) < 35, 6, 1))


def switch_point():
    """A change point that is summed out."""
    t = np.arange(60.0)
    with pm.Model() as model:
        when = pm.DiscreteUniform("when", 0, 59)
        early, late = pm.Exponential("early", 0.5), pm.Exponential("late", 0.5)
        pm.Poisson("y", pm.math.switch(t < when, early, late), observed=SWITCH)
    return model


def switch_sums(t, y):
    """Log p(y, when) of each change point, and the shape and rate of the gamma laws of both rates given it."""
    sides = [(t < when, t >= when) for when in range(60)]
    shapes = np.array([[1.0 + y[k].sum() for k in pair] for pair in sides])
    rates = np.array([[0.5 + k.sum() for k in pair] for pair in sides])
    log_p = (gammaln(shapes) - shapes * np.log(rates) + np.log(0.5)).sum(axis=1) - gammaln(y + 1).sum() - np.log(60.0)
    return log_p, shapes, rates


def switch_moments(t, y):
    """Moments of both rates, and the log marginal likelihood."""
    log_p, shapes, rates = switch_sums(t, y)
    p = np.exp(log_p - logsumexp(log_p))
    mean = p @ (shapes / rates)
    sd = np.sqrt(p @ (shapes * (shapes + 1.0) / rates**2) - mean**2)
    return mean, sd, logsumexp(log_p)


def _switch_point():
    mean, sd, evidence = switch_moments(np.arange(60.0), SWITCH)
    return {"moments": {"early": (mean[0], sd[0]), "late": (mean[1], sd[1])}, "evidence": (evidence, 0.0)}


MODELS = {
    "closed: beta-binomial": (beta_binomial, _beta_binomial, EXACT),
    "closed: gamma-Poisson": (gamma_poisson, _gamma_poisson, EXACT),
    "closed: line": (line, _line, GAUSSIAN),
    "grid: scale": (scale, _scale, EXACT),
    "closed: change point": (switch_point, _switch_point, EXACT),
}


# --- groups whose standard deviation is summed over a grid ------------------------------------------------------------

N_GROUPS, SEEN = 8, 0.7


def grouped_data():
    rng = np.random.default_rng(62)
    g = np.repeat(np.arange(N_GROUPS), 3)
    return g, 2.0 + rng.normal(0.0, 1.0, N_GROUPS)[g] + rng.normal(0.0, SEEN, len(g))


def grouped(g=None, y=None):
    """Measurements with known noise in groups: a mean, effects, and their standard deviation."""
    if g is None:
        g, y = grouped_data()
    with pm.Model(coords={"g": [f"g{i}" for i in range(N_GROUPS)]}) as model:
        index, mu, tau = pm.Data("index", g), pm.Normal("mu", 0.0, 5.0), pm.HalfNormal("tau", 1.5)
        u = pm.Normal("u", 0.0, tau, dims="g")
        pm.Normal("y", mu + u[index], SEEN, observed=y)
    return model


def given_tau(g, y, log_prior=None, n_groups=N_GROUPS):
    """Weights of a grid of tau, means and covariances of (mu, u) given each, and the log marginal likelihood."""
    taus = np.exp(np.linspace(-9.0, 2.5, 231))
    log_p = stats.halfnorm.logpdf(taus, scale=1.5) if log_prior is None else log_prior(taus)
    x = np.column_stack([np.ones(len(g)), np.eye(n_groups)[g]])
    parts = [normal_posterior(x, y, np.array([5.0, *[tau] * n_groups]), SEEN) for tau in taus]
    log_w = np.array([part[2] for part in parts]) + log_p + np.log(taus) + np.log(11.5 / 230)
    evidence = logsumexp(log_w)
    return taus, np.exp(log_w - evidence), *(np.array([part[i] for part in parts]) for i in range(2)), evidence


def of_linear(a, weights, means, covariances):
    """Mean and standard deviation of a linear function of (mu, u)."""
    middle = means @ a
    mean = weights @ middle
    return mean, np.sqrt(weights @ ((middle - mean) ** 2 + np.einsum("i,tij,j->t", a, covariances, a)))


def grouped_moments(g, y, **options):
    """Moments of mu, u and tau, and the log marginal likelihood."""
    taus, w, *rest, evidence = given_tau(g, y, **options)
    mu, *u = (of_linear(a, w, *rest) for a in np.eye(rest[0].shape[1]))
    return {"moments": {"mu": mu, "u": tuple(np.array(u).T), "tau": of_grid(taus, w)[:2]}, "evidence": (evidence, 0.0)}


MODELS["grid: groups"] = (grouped, lambda: grouped_moments(*grouped_data()), EXACT)
