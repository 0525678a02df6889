"""Each algorithm of the papers, shards, streams and minibatches, on problems whose answer is known."""

import warnings

import modes_models
import numpy as np
import pymc as pm
import pytest

from scipy import stats
from scipy.special import gammaln

import pymc_ngvi

from battery import closed
from battery.closed import normal_posterior
from battery.test_cases import fit, near

# --- problems: a model, the means and covariance of the best q of a family, and the evidence --------------------------


def two_parts(rows=None, batch=None):
    """The regression with known noise, its coefficients in two variables."""
    x, y = long_line() if batch else closed.line_data()
    x, y = (x, y) if rows is None else (x[rows], y[rows])
    with pm.Model() as model:
        a, b = pm.Normal("a", 0.0, 2.0, shape=2), pm.Normal("b", 0.0, 2.0)
        seen, design = (y, x) if batch is None else pm.Minibatch(y, x, batch_size=batch)
        total = {} if batch is None else {"total_size": len(y)}
        pm.Normal("y", design[:, :2] @ a + design[:, 2] * b, 0.8, observed=seen, **total)
    return model


def long_line():
    rng = np.random.default_rng(63)
    x = np.column_stack([np.ones(400), rng.normal(size=(400, 2))])
    return x, x @ [0.5, 1.0, -0.7] + rng.normal(0.0, 0.8, 400)


def best(family="full", data=closed.line_data):
    """Mean, covariance and evidence bound of the best Gaussian with blocks of independent coordinates."""
    mean, covariance, evidence = normal_posterior(*data(), 2.0, 0.8)
    precision = np.linalg.inv(covariance)
    kept = {"full": np.ones((3, 3)), "diagonal": np.eye(3), "block": np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])}[
        family
    ]
    found = np.linalg.inv(precision * kept)
    gap = 0.5 * (np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(found)[1])
    return mean, found, evidence - gap


def known_groups():
    """Groups with known scales: the posterior is Gaussian, and sparse. Also its mean, covariance and evidence."""
    rng, n = np.random.default_rng(64), 30
    g = np.repeat(np.arange(n), 3)
    y = 2.0 + rng.normal(size=n)[g] + 0.7 * rng.normal(size=len(g))
    with pm.Model() as model:
        mu, u = pm.Normal("mu", 0.0, 5.0), pm.Normal("u", 0.0, 1.0, shape=n)
        pm.Normal("y", mu + u[g], 0.7, observed=y)
    x = np.column_stack([np.ones(len(g)), np.eye(n)[g]])
    return model, normal_posterior(x, y, np.array([5.0, *[1.0] * n]), 0.7)


#: What a method without noise, and one whose steps are noisy, may be off by: means and sds, in sds; nats.
SURE, NOISY, ROUGH = (0.01, 0.01, 0.01), (0.15, 0.15, 0.1), (0.3, 0.3, 0.5)
GAUSSIAN = {"posterior": "gaussian"}
CONSTANT = {"step": "constant", "step_size": 0.1, "n": 400, "n_draws": 10}

#: Name -> (what is fitted, options, which family's answer, what it may be off by).
METHODS = {
    "default": ({}, "full", SURE),
    **{f"family {f}": ({"family": f}, f, SURE) for f in ("full", "diagonal", "block")},
    **{f"update {u}": ({"update": u}, "full", SURE) for u in ("natural", "cholesky", "cholesky_precision", "sqrt")},
    "update natural_pd": ({"update": "natural_pd"} | CONSTANT, "full", NOISY),
    **{f"estimator {e}": ({"estimator": e}, "full", SURE) for e in ("price", "quadrature")},
    **{f"estimator {e}": ({"estimator": e} | CONSTANT, "full", ROUGH) for e in ("stein", "pathwise")},
    "step linesearch": ({"step": "linesearch"}, "full", SURE),
    "step constant": (CONSTANT, "full", NOISY),
    "step decay": ({"step": "decay", "n": 400}, "full", NOISY),
    "step proximal": ({"step": "proximal", "n": 400}, "full", NOISY),
    "snngm, covariance": ({"update": "cholesky", "step": "snngm", "step_size": 0.01, "n": 2_000}, "full", ROUGH),
    "snngm, precision": (
        {"update": "cholesky_precision", "step": "snngm", "step_size": 0.01, "n": 2_000},
        "full",
        ROUGH,
    ),
    "adam": ({"update": "euclidean", "step": "adam", "n": 2_500}, "full", ROUGH),
    "sgd": (
        {"update": "euclidean", "step": "sgd", "factor": "covariance", "step_size": 2e-3, "n": 2_000},
        "full",
        ROUGH,
    ),
    "vogn": ({"estimator": "gauss_newton", "step": "constant", "step_size": 0.1, "n": 500}, "full", (0.15, 0.5, 1.0)),
    "ivon": ({"step": "ivon", "n": 2_000}, "full", (0.3, 0.6, 1.0)),
}


def holds(approx, answer, off):
    """Hold a Gaussian to the best one, and its evidence bound."""
    mean, covariance, elbo = answer
    sd = np.sqrt(np.diag(covariance))
    of_mean, of_sd, of_elbo = off
    assert np.all(np.abs(approx.mean_flat - mean) <= of_mean * sd), (approx.mean_flat - mean) / sd
    assert np.all(np.abs(approx.sd_flat / sd - 1) <= of_sd), approx.sd_flat / sd
    near(approx.elbo.value, elbo, of_elbo + 5 * approx.elbo.se)


def fitted(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps of one size end where they were told to
        return fit(model, 1, **GAUSSIAN, **options)


#: Methods of many cheap steps: not in the default suite.
LONG = ("snngm, covariance", "snngm, precision", "adam", "sgd", "vogn", "ivon")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.battery] * (name in LONG)) for name in METHODS])
def test_method(name):
    options, family, off = METHODS[name]
    holds(fitted(two_parts(), **options), best(family), off)


@pytest.mark.parametrize(
    "options", [{"family": "sparse"}, {"reparam": "rvb1"}, {"reparam": "rvb2"}, {"reparam": "noncentred"}], ids=str
)
def test_method_of_groups(options):
    """Scales are known, so that reparametrised effects are Gaussian as well."""
    model, (mean, covariance, evidence) = known_groups()
    approx = fitted(model, **options)
    draws = approx.sample(10_000, random_seed=1)["posterior"]
    for name, k in (("mu", slice(0, 1)), ("u", slice(1, None))):
        sd, values = np.sqrt(np.diag(covariance))[k], draws[name].to_numpy().reshape(10_000, -1)
        assert np.all(np.abs(values.mean(0) - mean[k]) < 0.1 * sd)
        assert np.all(np.abs(values.std(0) / sd - 1) < 0.06)
    near(approx.elbo.value, evidence, 0.02 + 5 * approx.elbo.se)


def test_mixture():
    approx = fitted(modes_models.two_modes(6.0, 0.6, True), family="mixture", n_components=2)
    mean, sd = modes_models._two_modes(6.0, 0.6)["x"]
    draws = approx.sample(10_000, chains=1, random_seed=1)["posterior"]["x"].to_numpy()[0]
    assert np.all(np.abs(draws.mean(0) - mean) < 0.1 * sd)
    assert np.all(np.abs(draws.std(0) / sd - 1) < 0.05)
    near(approx.elbo.value, np.log(2 * np.pi), 0.02 + 5 * approx.elbo.se)


def test_student_t():
    nu = 5.0
    with pm.Model() as model:
        x = pm.Flat("x", shape=2, initval=[1.0, -1.0])
        pm.Potential("p", -(nu + 2) / 2 * pm.math.log1p((x**2).sum() / nu))
    approx = fitted(model, family="student_t")
    draws = approx.sample(20_000, chains=1, random_seed=1)["posterior"]["x"].to_numpy()[0]
    for q in (0.05, 0.5, 0.95):
        share = np.mean(draws < stats.t(nu).ppf(q), axis=0)
        assert np.all(np.abs(share - q) < 5 * np.sqrt(q * (1 - q) / 20_000) + 0.01), share
    log_z = np.log(np.pi * nu) + gammaln(nu / 2) - gammaln((nu + 2) / 2)
    near(approx.elbo.value, log_z, 0.02 + 5 * approx.elbo.se)


@pytest.mark.battery
@pytest.mark.parametrize(("step", "off"), [("decay", 0.4), ("proximal", 1.0)])
def test_minibatches(step, off):
    mean, covariance, _ = normal_posterior(*long_line(), 2.0, 0.8)
    approx = fitted(two_parts(batch=50), step=step, n=600)
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(approx.mean_flat - mean) < off * sd), (approx.mean_flat - mean) / sd
    assert np.all(np.abs(approx.sd_flat / sd - 1) < 0.2), approx.sd_flat / sd


def test_shards():
    shards = pymc_ngvi.Shards(lambda k: two_parts(slice(10 * k, 10 * k + 10)), range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        approx = pm.fit(method="ngvi", shards=shards, random_seed=1, progressbar=False)
    holds(approx, best(), SURE)


def test_shards_of_groups():
    """Groups are in several shards, and are integrated all the same."""
    g, y = closed.grouped_data()
    shards = pymc_ngvi.Shards(lambda k: closed.grouped(g[k::3], y[k::3]), range(3))
    approx = pm.fit(method="ngvi", shards=shards, random_seed=1, progressbar=False)
    known = closed.grouped_moments(g, y)
    assert approx.is_exact
    near(approx.log_marginal_likelihood.value, known["evidence"][0], 5 * approx.log_marginal_likelihood.se + 0.01)
    draws = approx.sample(8_000, random_seed=1)["posterior"]
    for name, (mean, sd) in known["moments"].items():
        assert np.all(np.abs(draws[name].mean(("chain", "draw")).to_numpy() - mean) < 0.15 * np.asarray(sd)), name


def test_stream():
    x, y = long_line()
    parts = [{"x": x[k], "seen": y[k]} for k in np.array_split(np.arange(400), 5)]
    with pm.Model() as model:
        data, seen = pm.Data("x", parts[0]["x"]), pm.Data("seen", parts[0]["seen"])
        pm.Normal("y", data @ pm.Normal("beta", 0.0, 2.0, shape=3), 0.8, observed=seen, total_size=400)
    approx = fitted(model, batches=parts)
    mean, covariance, _ = normal_posterior(x, y, 2.0, 0.8)
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(approx.mean_flat - mean) < 0.05 * sd)
    assert np.all(np.abs(approx.sd_flat / sd - 1) < 0.05)
