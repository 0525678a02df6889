"""Posteriors under other priors by weights, beside fits with these priors: errors, verdicts, seconds.

Each model has other priors that weights should manage, and some that are far from the first one. Errors are differences
of unconstrained means and standard deviations from those of a fit with the new prior, in standard deviations of it.
From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python other_priors.py
"""

import argparse
import time
import warnings

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import today_and_here
from pages import measured_on, table, write_between_marks

import pymc_ngvi

HEADER = (
    "model", "posterior", "new prior", "k-hat", "effective size", "verdict", "em", "worst mean", "es", "log m: error",
    "its standard error", "s", "s of a fit",
)  # fmt: skip
type Priors = dict[str, Callable[[pm.Model], dict[str, Any]]]


def logistic() -> pm.Model:
    """Return a logistic regression with an intercept for each of 50 groups of 10."""
    rng = np.random.default_rng(1)
    group, x = np.repeat(np.arange(50), 10), rng.normal(size=500)
    eta = 0.3 + 0.5 * x + 0.8 * rng.normal(size=50)[group]
    with pm.Model() as model:
        a, b, sd = pm.Normal("a", 0.0, 2.0), pm.Normal("b", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, shape=50)
        pm.Bernoulli("y", logit_p=a + b * x + u[group], observed=rng.binomial(1, 1.0 / (1.0 + np.exp(-eta))))
    return model


def eight_schools() -> pm.Model:
    """Return the eight schools."""
    y, sigma = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
        theta = pm.Normal("theta", mu, tau, shape=8)
        pm.Normal("y", theta, sigma, observed=y)
    return model


def field() -> pm.Model:
    """Return counts with a Gaussian process as the logarithm of their mean."""
    rng = np.random.default_rng(1)
    x = np.linspace(0.0, 1.0, 60)[:, None]
    with pm.Model() as model:
        ls, eta = pm.InverseGamma("ls", 3.0, 1.0), pm.HalfNormal("eta", 1.0)
        f = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(1, ls)).prior("f", X=x)
        pm.Poisson("y", pm.math.exp(1.0 + f), observed=rng.poisson(np.exp(1.0 + np.sin(6.0 * x[:, 0]))))
    return model


def regression() -> pm.Model:
    """Return a linear regression with 25 predictors."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 25))
    y = x @ rng.normal(0.0, 0.5, size=25) + rng.normal(size=200)
    with pm.Model() as model:
        a, b, s = pm.Normal("a", 0.0, 2.0), pm.Normal("b", 0.0, 1.0, shape=25), pm.HalfNormal("s", 2.0)
        pm.Normal("y", a + x @ b, s, observed=y)
    return model


def growth() -> pm.Model:
    """Return a growth curve: no structure helps, and its posterior is moved where that is asked for."""
    rng = np.random.default_rng(1)
    t = np.linspace(0.0, 5.0, 40)
    with pm.Model() as model:
        top, rate, mid = pm.Normal("top", 10.0, 5.0), pm.HalfNormal("rate", 2.0), pm.Normal("mid", 2.0, 2.0)
        s = pm.HalfNormal("s", 1.0)
        observed = 8.0 / (1.0 + np.exp(-1.5 * (t - 2.5))) + 0.5 * rng.normal(size=40)
        pm.Normal("y", top * pm.math.sigmoid(rate * (t - mid)), s, observed=observed)
    return model


#: Name: model, value of the option ``posterior``, new priors by what they are called.
MODELS: dict[str, tuple[Callable[[], pm.Model], str, Priors]] = {
    "logistic, 50 groups": (
        logistic,
        "auto",
        {
            "sd: HalfCauchy(1)": lambda m: {"sd": pm.HalfCauchy.dist(1.0)},
            "sd: Exponential(5)": lambda m: {"sd": pm.Exponential.dist(5.0)},
            "sd: Gamma(20, 5)": lambda m: {"sd": pm.Gamma.dist(20.0, 5.0)},
            "sd: Gamma(400, 100)": lambda m: {"sd": pm.Gamma.dist(400.0, 100.0)},
            "a, b: Normal(0, .3)": lambda m: {"a": pm.Normal.dist(0.0, 0.3), "b": pm.Normal.dist(0.0, 0.3)},
            "u: StudentT(4, 0, sd)": lambda m: {"u": pm.StudentT.dist(4.0, mu=0.0, sigma=m["sd"])},
            "u: Normal(0, sd / 2)": lambda m: {"u": pm.Normal.dist(0.0, m["sd"] / 2.0)},
        },
    ),
    "eight schools": (
        eight_schools,
        "auto",
        {
            "tau: HalfNormal(5)": lambda m: {"tau": pm.HalfNormal.dist(5.0)},
            "tau: HalfNormal(1)": lambda m: {"tau": pm.HalfNormal.dist(1.0)},
            "tau: Gamma(100, 4)": lambda m: {"tau": pm.Gamma.dist(100.0, 4.0)},
            "mu: Normal(0, 20)": lambda m: {"mu": pm.Normal.dist(0.0, 20.0)},
            "mu: Normal(-20, 1)": lambda m: {"mu": pm.Normal.dist(-20.0, 1.0)},
        },
    ),
    "counts on a Gaussian process": (
        field,
        "auto",
        {
            "ls: InverseGamma(5, 5)": lambda m: {"ls": pm.InverseGamma.dist(5.0, 5.0)},
            "eta: Exponential(3)": lambda m: {"eta": pm.Exponential.dist(3.0)},
            "ls: Gamma(400, 2,000)": lambda m: {"ls": pm.Gamma.dist(400.0, 2000.0)},
            "ls: Gamma(100, 20)": lambda m: {"ls": pm.Gamma.dist(100.0, 20.0)},
        },
    ),
    "regression, 25 predictors": (
        regression,
        "gaussian",
        {
            "b: Normal(0, .5)": lambda m: {"b": pm.Normal.dist(0.0, 0.5)},
            "b: StudentT(4, 0, .3)": lambda m: {"b": pm.StudentT.dist(4.0, mu=0.0, sigma=0.3)},
            "b: Laplace(0, .1)": lambda m: {"b": pm.Laplace.dist(0.0, 0.1)},
            "b: Normal(0, .05)": lambda m: {"b": pm.Normal.dist(0.0, 0.05)},
            "s: HalfCauchy(.5)": lambda m: {"s": pm.HalfCauchy.dist(0.5)},
        },
    ),
    "growth curve": (
        growth,
        "moved",
        {
            "rate: Exponential(1)": lambda m: {"rate": pm.Exponential.dist(1.0)},
            "top: Normal(9, .3)": lambda m: {"top": pm.Normal.dist(9.0, 0.3)},
            "top: Normal(14, .3)": lambda m: {"top": pm.Normal.dist(14.0, 0.3)},
        },
    ),
}


def row_of(approx: Any, model: pm.Model, posterior: str, priors: dict[str, Any]) -> list[Any]:
    """Return what weights give, and how far it is from a fit."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = approx.with_prior(priors)
    taken, began = time.process_time() - began, time.process_time()
    with found.model:
        again = pymc_ngvi.fit_ngvi(random_seed=2, posterior=posterior, progressbar=False)
    of_fit = time.process_time() - began
    q = found._weighted
    if posterior == "gaussian":  # its own weights make it the posterior, where they help
        theta = again.draw_flat(40_000, random_seed=3)
        weights = again.log_p(theta) - again.log_q(theta)
        weights = np.exp(weights - weights.max())
        weights /= weights.sum()
        mean = weights @ theta
        sd = np.sqrt(weights @ (theta - mean) ** 2)
    else:
        mean, sd = again.mean_flat, again.sd_flat
    of_mean, of_sd = np.abs(q.mean() - mean) / sd, q.sd() / sd - 1.0
    try:
        m, reference = found.log_marginal_likelihood, again.log_marginal_likelihood
        evidence = [f"{m.value - reference.value:+.3f}", f"{np.hypot(m.se, reference.se):.3f}"]
    except ValueError:
        evidence = ["-", "-"]
    return [
        f"{found.checks.khat:.2f}", f"{found.checks.effective_size:,.0f}", found.checks.word.value,
        f"{np.sqrt(np.mean(of_mean**2)):.3f}", f"{of_mean.max():.3f}", f"{np.sqrt(np.mean(of_sd**2)):.3f}", *evidence,
        f"{taken:.2f}", f"{of_fit:.1f}",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="page with marks, or a new file")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        make, posterior, priors = MODELS[name]
        with make() as model:
            approx = pymc_ngvi.fit_ngvi(random_seed=1, posterior=posterior, progressbar=False)
        for what, of in priors.items():
            rows.append([name, approx._distribution.family, what, *row_of(approx, model, posterior, of(model))])
            print(*rows[-1], sep=" | ", flush=True)
    if options.table:
        lines = [*measured_on([today_and_here()]), *table(HEADER, rows)]
        write_between_marks(options.table, "\n".join(lines) + "\n", Path(__file__).name)


if __name__ == "__main__":
    main()
