"""Models whose scales have wide priors, on raw data: how far below the best known ELBO each seed ends.

The best known is the best of the fits themselves and of fits from dispersed starts of all positive variables. Fits that
are in the results file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its
root.

Examples
--------
::

    python wide_priors.py --seeds 20
"""

import functools

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from fits_by_seed import FIELDS, ended, mean, parser_of, run_missing, write_page
from records import Records, Row

HEADER = "model", "best known", "worst seed below it", "within .5 nats", "ended", "gradients", "Hessians"
#: Seed of the first fit from a dispersed start.
FIRST_START = 1_000
N_ITERATIONS = 1_000
#: Starts of a positive variable, as factors of its initial value.
FACTORS = (0.05, 0.3, 1.0, 3.0)
#: Yearly flow of the Nile at Aswan, 1871 to 1970.
NILE = np.array([
    1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960, 1180, 799, 958,
    1140, 1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694, 940, 833, 701, 916, 692, 1020,
    1050, 969, 831, 726, 456, 824, 702, 1120, 1100, 832, 764, 821, 768, 845, 864, 862, 698, 845, 744, 796, 1040,
    759, 781, 865, 845, 944, 984, 897, 822, 1010, 771, 676, 649, 846, 812, 742, 801, 1040, 860, 874, 848, 890,
    744, 749, 838, 1050, 918, 986, 797, 923, 975, 815, 1020, 906, 901, 1170, 912, 746, 919, 718, 714, 740,
], dtype=float)  # fmt: skip


def local_level() -> pm.Model:
    """Nile flows."""
    with pm.Model() as model:
        level = pm.GaussianRandomWalk(
            "level", sigma=pm.HalfNormal("sigma_level", 50), init_dist=pm.Normal.dist(1000, 200), shape=100
        )
        pm.Normal("y", level, pm.HalfNormal("sigma", 200), observed=NILE)
    return model


def random_intercepts() -> pm.Model:
    """20 groups of 8 with a raw predictor."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(20), 8)
    x = rng.normal(50.0, 10.0, 160)
    y = 300.0 + 4.0 * x + 40.0 * rng.standard_normal(20)[group] + 90.0 * rng.standard_normal(160)
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, 1000.0)
        b = pm.Normal("b", 0.0, 100.0)
        sd = pm.HalfNormal("sd", 300.0)
        u = pm.Normal("u", 0.0, sd, shape=20)
        pm.Normal("y", a + b * x + u[group], pm.HalfNormal("sigma", 300.0), observed=y)
    return model


def local_linear_trend() -> pm.Model:
    """A level with a slope that walks."""
    rng = np.random.default_rng(2)
    slope = 5.0 + np.cumsum(1.5 * rng.standard_normal(80))
    level = 2000.0 + np.cumsum(slope + 10.0 * rng.standard_normal(80))
    y = level + 40.0 * rng.standard_normal(80)
    with pm.Model() as model:
        slope = pm.GaussianRandomWalk(
            "slope", sigma=pm.HalfNormal("sigma_slope", 20.0), init_dist=pm.Normal.dist(0.0, 50.0), shape=79
        )
        steps = pm.Normal("steps", slope, pm.HalfNormal("sigma_level", 50.0), shape=79)
        first = pm.Normal("first", 2000.0, 500.0)
        level = pt.concatenate([first[None], first + pt.cumsum(steps)])
        pm.Normal("y", level, pm.HalfNormal("sigma", 200.0), observed=y)
    return model


def seasonal() -> pm.Model:
    """A level that walks, and effects of months."""
    rng = np.random.default_rng(3)
    month = np.arange(96) % 12
    y = (
        5000.0
        + np.cumsum(30.0 * rng.standard_normal(96))
        + (300.0 * rng.standard_normal(12))[month]
        + 80.0 * rng.standard_normal(96)
    )
    with pm.Model() as model:
        level = pm.GaussianRandomWalk(
            "level", sigma=pm.HalfNormal("sigma_level", 200.0), init_dist=pm.Normal.dist(5000.0, 1000.0), shape=96
        )
        season = pm.Normal("season", 0.0, pm.HalfNormal("sigma_season", 500.0), shape=12)
        pm.Normal("y", level + season[month], pm.HalfNormal("sigma", 500.0), observed=y)
    return model


def autoregression() -> pm.Model:
    """A latent AR(1) process with noise."""
    rng = np.random.default_rng(4)
    z = np.zeros(120)
    for t in range(1, 120):
        z[t] = 0.8 * z[t - 1] + 40.0 * rng.standard_normal()
    y = 700.0 + z + 40.0 * rng.standard_normal(120)
    with pm.Model() as model:
        mu = pm.Normal("mu", 500.0, 500.0)
        rho = pm.Beta("rho", 2.0, 2.0)
        s = pm.HalfNormal("sigma_state", 200.0)
        z = pm.AR("z", rho=rho, sigma=s, init_dist=pm.Normal.dist(0.0, 200.0), shape=120)
        pm.Normal("y", mu + z, pm.HalfNormal("sigma", 200.0), observed=y)
    return model


def spline() -> pm.Model:
    """A smoother whose weights walk."""
    rng = np.random.default_rng(5)
    x = np.linspace(0.0, 1.0, 150)
    y = 400.0 + 150.0 * np.sin(9.0 * x) + 60.0 * rng.standard_normal(150)
    knots = np.linspace(-0.05, 1.05, 25)
    basis = np.exp(-0.5 * ((x[:, None] - knots) / 0.05) ** 2)
    basis /= basis.sum(axis=1, keepdims=True)
    with pm.Model() as model:
        tau = pm.HalfCauchy("tau", 100.0)
        w = pm.GaussianRandomWalk("w", sigma=tau, init_dist=pm.Normal.dist(0.0, 1000.0), shape=25)
        pm.Normal("y", basis @ w, pm.HalfCauchy("sigma", 100.0), observed=y)
    return model


def three_levels() -> pm.Model:
    """Pupils in classes in schools."""
    rng = np.random.default_rng(6)
    school, cls = np.repeat(np.arange(15), 24), np.repeat(np.arange(60), 6)
    y = (
        500.0
        + 30.0 * rng.standard_normal(15)[school]
        + 20.0 * rng.standard_normal(60)[cls]
        + 70.0 * rng.standard_normal(360)
    )
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1000.0)
        u = pm.Normal("u", 0.0, pm.HalfNormal("sd_school", 200.0), shape=15)
        v = pm.Normal("v", 0.0, pm.HalfNormal("sd_class", 200.0), shape=60)
        pm.Normal("y", mu + u[school] + v[cls], pm.HalfNormal("sigma", 200.0), observed=y)
    return model


def returns() -> pm.Model:
    """Stochastic volatility of differences of prices."""
    rng = np.random.default_rng(7)
    hs, z = [], 0.0
    for _ in range(200):
        z = 0.95 * z + 0.25 * rng.standard_normal()
        hs.append(np.log(60.0) + z)
    y = 8.0 + np.exp(hs) * rng.standard_normal(200)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 100.0)
        step = pm.Exponential("step", 10.0)
        h = pm.GaussianRandomWalk("h", sigma=step, init_dist=pm.Normal.dist(0.0, 10.0), shape=200)
        pm.StudentT("y", nu=pm.Exponential("nu", 0.1), mu=mu, sigma=pt.exp(h), observed=y)
    return model


MODELS = {
    f.__name__: f
    for f in (
        local_level,
        random_intercepts,
        local_linear_trend,
        seasonal,
        autoregression,
        spline,
        three_levels,
        returns,
    )
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit each model with each seed and from each dispersed start that is missing, and write the table."""
    parser = parser_of(__doc__, MODELS, "wide_priors", 20)
    parser.add_argument("--starts", type=int, default=20, help="dispersed starts")
    options = parser.parse_args(arguments)
    records = Records(options.out, FIELDS)
    for name in options.models if options.seeds else ():
        model = MODELS[name]()
        run_missing(records, name, model, range(1, options.seeds + 1), n=N_ITERATIONS)
        starts = range(FIRST_START, FIRST_START + options.starts)
        run_missing(records, name, model, starts, functools.partial(dispersed, model), N_ITERATIONS)
    write_page(options.table, HEADER, records.read(), cells, Path(__file__).name)


def dispersed(model: pm.Model, seed: int) -> dict[str, Any]:
    """Return a start with other values of all positive variables."""
    rng = np.random.default_rng(seed - FIRST_START)
    point = model.initial_point()
    return {
        name: np.asarray(value + np.log(rng.choice(FACTORS)))
        for name, value in point.items()
        if name.endswith("_log__")
    }


def cells(name: str, rows: Sequence[Row]) -> list[object]:
    """Return a row of the table."""
    best = max(float(row["elbo"]) for row in rows)
    rows = [row for row in rows if not row["start"]]
    elbos = np.array([float(row["elbo"]) for row in rows])
    within = f"{np.sum(elbos > best - 0.5)} of {len(rows)}"
    effort = [mean(rows, column) for column in ("n_gradients", "n_hessians")]
    return [name, f"{best:,.2f}", f"{best - elbos.min():.2f}", within, ended(rows), *effort]


if __name__ == "__main__":
    main()
