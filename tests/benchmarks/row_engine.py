"""Rows by engine: what an expectation under a Gaussian takes, and what rows take to be made, side by side.

Each engine evaluates the same rows by the same rules, in turns in one process, on one thread; times are processor
seconds, the least of several. "Made" is what it takes from the rows as graphs to functions, and to second derivatives.
"The first" chooses rules of quadrature; "others" have them. From a checkout that is not installed, set ``PYTHONPATH``
to its root.

Examples
--------
::

    python row_engine.py
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import datetime
import time

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from environment import describe_environment
from pages import measured_on, table, write_between_marks

from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.families.gaussian import DiagonalState
from pymc_ngvi.graphs.backends import quickly
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.reading.found import Reading
from pymc_ngvi.rows.engines import ENGINES

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "row_engine.md"
#: Engines by backend, PyTensor's with functions that nothing is compiled for.
NAMES = {"quick": "fused", "c": "virtual machine"}
#: Standard deviation of all coordinates; how often each is measured.
SD, TIMES = 0.2, 7
#: Second derivatives of rows of more predictors are not made by PyTensor here: it takes minutes.
MOST_PREDICTORS = 5


def _panel(n_rows: int, n_groups: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return np.arange(n_rows) % n_groups, rng.normal(size=(n_rows, 2)), rng


def logistic_given() -> pm.Model:
    group, x, rng = _panel(2_000, 60, 1)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0.0, 0.7, shape=60), pm.Normal("b", 0.0, 0.4, shape=60)
        eta = a[group] + b[group] * x[:, 0] + x @ pm.Normal("beta", shape=2)
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(2, size=2_000))
    return model


def logistic_slopes() -> pm.Model:
    group, x, rng = _panel(2_000, 60, 1)
    with pm.Model() as model:
        sd, z = pm.HalfNormal("sd", 1.0, shape=2), pm.Normal("z", shape=(60, 2))
        eta = sd[0] * z[group, 0] + sd[1] * z[group, 1] * x[:, 0] + x @ pm.Normal("beta", shape=2)
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(2, size=2_000))
    return model


def counts() -> pm.Model:
    group, x, rng = _panel(400, 60, 2)
    with pm.Model() as model:
        sd, z = pm.HalfNormal("sd", 1.0), pm.Normal("z", shape=60)
        rate = pt.exp(sd * z[group] + x @ pm.Normal("beta", shape=2))
        pm.NegativeBinomial("y", mu=rate, alpha=pm.Exponential("alpha", 0.5), observed=rng.poisson(2, size=400))
    return model


def linear() -> pm.Model:
    group, x, rng = _panel(900, 85, 3)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, sd, shape=85)
        pm.Normal("y", b[group] + x @ pm.Normal("beta", shape=2), pm.HalfNormal("s"), observed=rng.normal(size=900))
    return model


def schools() -> pm.Model:
    with pm.Model() as model:
        mu, tau, z = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5), pm.Normal("z", shape=8)
        y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
        pm.Normal("y", mu + tau * z, np.array([15.0, 10, 16, 11, 9, 11, 10, 18]), observed=y)
    return model


def logistic_large() -> pm.Model:
    _, _, rng = _panel(1, 1, 4)
    x = rng.normal(size=(100_000, 50))
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=x @ pm.Normal("beta", shape=50), observed=rng.integers(2, size=100_000))
    return model


MODELS: dict[str, Callable[[], pm.Model]] = {
    "logistic, 2,000 rows of one predictor": logistic_given,
    "logistic, 2,000 rows, intercept and slope not centred": logistic_slopes,
    "negative binomial, 400 rows, not centred": counts,
    "linear, 900 rows, groups": linear,
    "eight schools, not centred": schools,
    "logistic, 100,000 rows": logistic_large,
}


def seconds_of(calls: list[Callable[[], object]]) -> list[float]:
    """Return the least processor seconds of each of several calls, made in turns."""
    least = [np.inf] * len(calls)
    for _ in range(TIMES):
        for k, call in enumerate(calls):
            start = time.process_time()
            call()
            least[k] = min(least[k], time.process_time() - start)
    return least


def made_in(name: str, rows: Expectations) -> tuple[float, float | None]:
    """Return the seconds from graphs to functions, and to second derivatives; None where these are not made."""
    engine, start = ENGINES[name](quickly), time.process_time()
    for kind in rows.terms.rows:
        engine.row_function(kind)
    made = time.process_time() - start
    start = time.process_time()
    try:
        for kind in rows.terms.rows:
            if kind.index.shape[1] > MOST_PREDICTORS:
                return made, None
            engine.second_derivatives(kind)
    except MissingDerivativeError:
        return made, None
    return made, time.process_time() - start


def measured(build: Callable[[], pm.Model]) -> list[tuple[str, list[float | None]]]:
    """Return what each engine takes: made, second derivatives, the first expectation and others, in milliseconds."""
    density = LogDensity(build())
    found = density.rows
    assert found is not None
    start = density.initial_point()
    rows = {}
    for name in NAMES:
        reading = Reading(density.graphs.parts, density.graphs.theta, density.graphs.simplify, quickly)
        rows[name] = Expectations(reading, quickly, name)
    made = {name: made_in(name, found) for name in NAMES}
    q = DiagonalState.from_scale(start, np.full(density.n_dim, SD))
    first = {name: part.under(q) for name, part in rows.items()}
    values = [expectation.grad for expectation in first.values()]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9, atol=1e-9 * np.abs(values[0]).max())
    adapting = seconds_of([lambda part=part: part.under(q) for part in rows.values()])
    by_rules = seconds_of(
        [lambda part=rows[name], rules=first[name].rules: part.under(q, rules=rules) for name in NAMES]
    )
    return [
        (name, [1e3 * s if s is not None else None for s in (*made[name], adapting[k], by_rules[k])])
        for k, name in enumerate(NAMES)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--print", action="store_true", help="print, and leave the page as it is")
    args = parser.parse_args()
    lines = []
    for model, build in MODELS.items():
        if args.only in model:
            for name, times in measured(build):
                cells = ["" if t is None else f"{t:.3g}" for t in times]
                lines.append([model, NAMES[name], *cells])
                print(*lines[-1], sep=" | ", flush=True)
    head = ["model", "engine", "made, ms", "second derivatives made, ms", "first expectation, ms", "others, ms"]
    if not args.print:
        here = {"date": datetime.datetime.now(tz=datetime.UTC).isoformat(), "environment": describe_environment()}
        write_between_marks(PAGE, "\n".join([*measured_on([here]), *table(head, lines)]), Path(__file__).name)


if __name__ == "__main__":
    main()
