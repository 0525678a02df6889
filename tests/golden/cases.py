"""Of what there is a record: models, and fits by every method."""

import contextlib
import functools
import warnings

import exact
import glmm
import hierarchical
import latent_models
import mixture_targets
import models
import models_glmm
import numpy as np
import pymc as pm
import real_models
import sharded_models
import tan
import weights

from matrix import COMBINATIONS, pairs_once
from targets import random_intercepts
from users_models import MODELS as USERS

from golden.measured import arrays_of, fit_of
from pymc_ngvi import LogDensity, Shards, fit_ngvi, inference
from pymc_ngvi.core.draws import sobol_draws

#: Iterations of a fit that stands for a method: its path, not its end.
FEW = 40

# --- models -----------------------------------------------------------------------------------------------------------

#: Some of the tests' models: kinds of rows that the battery has not, and patterns of every family.
TESTS = {
    **{f"tests: {name}": make for name, make in models.STABILITY.items()},
    **{f"tests: {name}": make for name, make in models.FEATURES.items() if name != "zero_size"},
    "tests: random intercepts": random_intercepts,
    "tests: epilepsy": real_models.epilepsy,
    "tests: slopes": lambda: hierarchical.correlated(n_groups=20),
    "tests: joint": lambda: hierarchical.joint(n_groups=20),
    "tests: random walk": lambda: hierarchical.random_walk(60),
    "tests: stochastic volatility": lambda: hierarchical.stochastic_volatility(60),
    "tests: lattice": lambda: hierarchical.areas(rows=6, columns=6),
    "tests: proper lattice": lambda: hierarchical.areas("proper", rows=6, columns=6),
    "tests: crossed": lambda: hierarchical.crossed(40, 40),
    "tests: zero sum": lambda: hierarchical.zero_sum(20),
    "tests: student effects": lambda: hierarchical.student_effects(20),
    "tests: hurdle": lambda: hierarchical.hurdle(20),
    "tests: level": latent_models.level,
    "tests: process": latent_models.process,
    "tests: counts": latent_models.counts,
    "tests: normal of shards": sharded_models.normal,
    "tests: groups of shards": sharded_models.grouped,
}
MODELS = {f"users: {name}": build for name, (_, build) in USERS.items()} | TESTS


def density_of(name):
    """Return the log density of a model."""
    return LogDensity(MODELS[name](), backend="quick")


# --- fits -------------------------------------------------------------------------------------------------------------


def fitted(model, *, is_short=False, n=None, **options):
    """Return the outcome of a fit."""
    options = {"random_seed": 1, "progressbar": False, "backend": "quick", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status is in the record
        approx = fit_ngvi(*([] if n is None else [n]), model=model, **options)
    return fit_of(approx, is_short=is_short)


def _user(name, **options):
    """Return the fit of a model of the battery by the default."""
    return lambda: fitted(MODELS[name](), backend="auto", **options)


@contextlib.contextmanager
def _built_once(density):
    """Build log p once for all fits of a model."""
    make = inference.density_of
    inference.density_of = lambda *_: density.again("quick")
    try:
        yield
    finally:
        inference.density_of = make


@functools.cache
def _intercepts():
    return random_intercepts()


@functools.cache
def _compiled():
    return LogDensity(_intercepts(), "quick")


def combination(choice):
    """Return the path of one combination of family, update, estimator and step rule."""
    n = {"mixture": 2, "student_t": 3}.get(choice.family, FEW // 2)
    options = {"n_components": 2} if choice.family == "mixture" else {}
    with _built_once(_compiled()):
        return fitted(_intercepts(), is_short=True, n=n, **choice.given(), **options)


_BY_NAME = {" ".join(vars(choice).values()): choice for choice in COMBINATIONS}
COMBINED = {f"combination: {name}": functools.partial(combination, choice) for name, choice in _BY_NAME.items()}
#: Each pair of entries is in one of these.
PAIRS = tuple(f"combination: {' '.join(vars(choice).values())}" for choice in pairs_once(COMBINATIONS))


def _logistic(n=120, batch=None):
    rng = np.random.default_rng(21)
    x = np.column_stack([np.ones(n), rng.standard_normal((n, 4))])
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ [0.3, 1.0, -0.8, 0.0, 0.5]))).astype(float)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=5)
        rows, seen = (x, y) if batch is None else pm.Minibatch(x, y, batch_size=batch)
        pm.Bernoulli("y", logit_p=rows @ beta, observed=seen, **({} if batch is None else {"total_size": n}))
    return model


def _linear(batch):
    rng = np.random.default_rng(22)
    x = rng.standard_normal((200, 4))
    with pm.Model() as model:
        rows, seen = pm.Minibatch(x, x @ [1.0, -1.0, 0.5, 0.0] + rng.standard_normal(200), batch_size=batch)
        pm.Normal("y", rows @ pm.Normal("beta", 0, 1, shape=4), 1.0, observed=seen, total_size=200)
    return model


def _network(batch=None):
    rng = np.random.default_rng(23)
    x = rng.uniform(-1.0, 1.0, (90, 2))
    y = (x[:, 0] * x[:, 1] > 0.0).astype(float)
    with pm.Model() as model:
        rows, seen = (x, y) if batch is None else pm.Minibatch(x, y, batch_size=batch)
        w1, b1 = pm.Normal("w1", 0, 2, shape=(2, 4)), pm.Normal("b1", 0, 1, shape=4)
        w2, b2 = pm.Normal("w2", 0, 2, shape=4), pm.Normal("b2", 0, 1)
        p = pm.math.sigmoid(pm.math.tanh(rows @ w1 + b1) @ w2 + b2)
        pm.Bernoulli("y", p=p, observed=seen, **({} if batch is None else {"total_size": 90}))
    return model


def _tan(kind):
    """Return a row of Tan's table 5, on a small regression."""
    return lambda: fitted(_logistic(), is_short=True, n=FEW, start_sigma=tan.START_SD, **tan.KINDS[kind].options)


@functools.cache
def _patients():
    return models_glmm.epilepsy(models_glmm.read("epilepsy", real_models.EXAMPLE_DATA, 15))


def _table_6(kind):
    """Return a row of Tan's table 6, on some of the patients."""
    options = glmm.KINDS[kind].options_for(_patients())
    is_short = glmm.KINDS[kind].as_published
    return fitted(_patients().model, is_short=is_short, **options | ({"n": FEW} if is_short else {}))


def _wu_gardner(batch=None, **options):
    plain = {"step_size": 0.1} if options.get("step") == "constant" else {}
    return lambda: fitted(_logistic(batch=batch), is_short=True, n=FEW, n_draws=10, **plain, **options)


def _weights(update):
    """Return components and weights after steps of one size: the natural gradient, or the direction as printed."""
    known = mixture_targets.target("banana")
    density, q = weights.Shifted(LogDensity(known.build(), "quick"), 0.0), weights.start_of("banana", 1, 0.0)
    base = sobol_draws(32, q.n_dim, np.random.default_rng(0))
    for _ in range(5):
        q = weights.joint_step(density, q, base, update, 0.1)
    return arrays_of(log_weights=q.log_weights, means=[c.mean() for c in q.components])


def _sites():
    approx = fit_ngvi(model=_logistic(), posterior="gaussian", random_seed=1, progressbar=False, backend="quick")
    found = approx.sites()
    return arrays_of(**{name: found[name].values[::10] for name in map(str, found.data_vars)})


def _shards(make, **options):
    def run():
        shards = Shards(sharded_models.of_rows(make), range(sharded_models.N_SHARDS))
        return fitted(None, shards=shards, **options)

    return run


def _streamed(make):
    def run():
        rng = np.random.default_rng(24)
        x = rng.standard_normal(600)
        data = {"x": x, "y": make(x, rng)}
        parts = [{name: array[at] for name, array in data.items()} for at in np.array_split(np.arange(600), 6)]
        with pm.Model() as model:
            x, y = pm.Data("x", parts[0]["x"]), pm.Data("y", parts[0]["y"])
            a, b = pm.Normal("a", 0.0, 5.0), pm.Normal("b", 0.0, 1.0)
            if make is _counted:
                pm.Poisson("seen", pm.math.exp(a + b * x), observed=y, total_size=600)
            else:
                pm.Normal("seen", a + b * x, pm.HalfNormal("sd", 5.0), observed=y, total_size=600)
        return fitted(model, batches=parts, posterior="gaussian")

    return run


def _counted(x, rng):
    return rng.poisson(np.exp(0.5 + 0.4 * x))


def _measured(x, rng):
    return 1.0 + 2.0 * x + rng.standard_normal(len(x))


def _reparametrised(kind, **options):
    return lambda: fitted(hierarchical.intercepts(n_groups=15), reparam=kind, **options)


def _mixed(name, **options):
    return lambda: fitted(mixture_targets.target(name).build(), **options)


PAPERS = {
    **{f"tan, table 5: {kind}": _tan(kind) for kind in tan.KINDS if tan.KINDS[kind].options},
    **{f"tan, table 6: {kind}": functools.partial(_table_6, kind) for kind in glmm.KINDS},
    **{
        f"wu and gardner: {method}, {draws}": _wu_gardner(
            update="natural", estimator=method, step="constant", **options
        )
        for method in ("price", "pathwise", "stein")
        for draws, options in {
            "plain": {"base_draws": "plain", "stl": False},
            "antithetic": {"base_draws": "antithetic", "stl": True},
        }.items()
    },
    "wu and gardner, figure 1: natural": lambda: fitted(_linear(40), is_short=True, n=FEW, step="decay"),
    "wu and gardner, figure 1: gradients": lambda: fitted(
        _linear(40), is_short=True, n=FEW, update="euclidean", step="sgd", factor="covariance", step_size=1e-4
    ),
    "wu and gardner, figure 2: natural": _wu_gardner(
        update="natural", estimator="price", step="constant", base_draws="plain"
    ),
    "wu and gardner, figure 2: batches": _wu_gardner(batch=30, update="natural", estimator="pathwise", step="constant"),
    "wu and gardner, figure 2: gradients": lambda: fitted(
        _logistic(), is_short=True, n=FEW, update="euclidean", estimator="price", step="sgd", factor="covariance",
        step_size=1e-3,
    ),
    "proximal": lambda: fitted(_logistic(batch=30), is_short=True, n=FEW, step="proximal"),
    "sites": _sites,
    "vogn": lambda: fitted(_network(), is_short=True, n=FEW, estimator="gauss_newton", step="decay"),
    "vogn, batches": lambda: fitted(_network(30), is_short=True, n=FEW, estimator="gauss_newton", step="constant"),
    "ivon": lambda: fitted(_network(), is_short=True, n=FEW, step="ivon"),
    "ivon, batches": lambda: fitted(_network(30), is_short=True, n=FEW, step="ivon", estimator="gauss_newton"),
    "snngm, batches": lambda: fitted(
        _logistic(batch=30), is_short=True, n=FEW, update="cholesky", estimator="pathwise", step="snngm"
    ),
    "rvb1": _reparametrised("rvb1"),
    "rvb2": _reparametrised("rvb2"),
    "noncentred": _reparametrised("noncentred"),
    "weights: natural": lambda: _weights("natural"),
    "weights: as printed": lambda: _weights("tan"),
    "mixture: two modes": _mixed("two modes", family="mixture", n_components=2),
    "mixture: banana": _mixed("banana", family="mixture", n_components=3),
    "mixture: auto": _mixed("skewed logistic", family="mixture"),
    "mixture: diagonal components": _mixed("banana", family="mixture", n_components=2, components="diagonal"),
    "student t": _mixed("skewed logistic", family="student_t"),
    "student t: heavy tails": _mixed("Student-t mixture", family="student_t"),
    **{
        f"family: {family}": functools.partial(lambda f: fitted(_intercepts(), family=f), family)
        for family in ("full", "diagonal", "block", "sparse")
    },
    "family: filled": lambda: fitted(hierarchical.areas("proper", rows=6, columns=6), family="sparse"),
    "family: sums": lambda: fitted(hierarchical.areas(rows=20, columns=20), posterior="gaussian"),
    "draws in the place of rows": lambda: fitted(_intercepts(), family="full", estimator="price"),
    "exact: one effect": lambda: fitted(exact.one(), posterior="exact"),
    "exact: two effects": lambda: fitted(exact.two(), posterior="exact"),
    "nested: level": lambda: fitted(latent_models.level(), posterior="nested"),
    "nested: counts": lambda: fitted(latent_models.counts(), posterior="nested"),
    "nested first: process": lambda: fitted(latent_models.process()),
    "asked for a gaussian": lambda: fitted(exact.one(), posterior="gaussian"),
    "too dear": lambda: fitted(exact.one(), max_seconds=0.01),
    "shards: logistic": _shards(sharded_models.logistic, posterior="gaussian"),
    "shards: normal": _shards(sharded_models.normal, posterior="exact"),
    "shards: grouped": _shards(sharded_models.grouped, posterior="gaussian"),
    "stream: counts": _streamed(_counted),
    "stream: normal": _streamed(_measured),
    "minibatch": lambda: fitted(_logistic(batch=30), is_short=True, n=FEW),
}  # fmt: skip

OF_USERS = [name for name in MODELS if name.startswith("users: ")]
#: Gaussians of the battery, which have no Monte Carlo error where they are those of rows; and what comes of these.
BATTERY = {name: _user(name) for name in OF_USERS}
GAUSSIANS = {name.replace("users", "gaussian of users"): _user(name, posterior="gaussian") for name in OF_USERS}
FITS = BATTERY | GAUSSIANS | PAPERS | COMBINED
