"""Power of the tests behind a verdict: draws that are right, and the same with an error of the size that counts.

Draws of posteriors that are known in closed form, of exact fits, and of Gaussians are given an error in one coordinate
or in one function of them: a mean that is 0.15 standard deviations off, a standard deviation that is 12 % off, or
limits that are 0.2 standard deviations off where moments are right. Each diagnosis is asked what stands against the
draws. A run can be stopped and resumed. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python verdict_power.py
    python verdict_power.py --cases rates --repeats 20 --out small.csv --table small.md
    python verdict_power.py --repeats 0
"""

import argparse
import datetime
import functools
import time
import warnings

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pymc as pm

from environment import describe_environment
from pages import column_of, measured_on, table, write_between_marks
from records import Records, Row
from scipy.special import ndtri

import pymc_ngvi

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.families import FullState
from pymc_ngvi.results import diagnosis as making

RESULTS = Path(__file__).parent / "results"
#: Errors of coordinates and functionals: those that count.
MEAN, SD, LIMIT = 0.15, 0.12, 0.2
#: Bend of draws that moves both 89 % limits by `LIMIT`, and moments by little.
BEND = LIMIT / (ndtri(0.945) ** 2 - 1.0)
ERRORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda z: z,
    "mean": lambda z: z + MEAN,
    "wider": lambda z: (1.0 + SD) * z,
    "narrower": lambda z: z / (1.0 + SD),
    "limits": lambda z: (z + BEND * (z**2 - 1.0)) / np.sqrt(1.0 + 2.0 * BEND**2),
}
#: What stands against draws, by the name of its condition.
TESTS = ("mean", "sd", "lower", "upper", "log p", "draws far away", "k-hat", "acceptance")
KEY = ("case", "error", "where", "repeat")
FIELDS = (*KEY, "reliable", *TESTS, "n_gradients", "seconds", "date", "environment")

CAPTION = """\
Part of the repeats in which a verdict is "not reliable": for draws without an error, and with one in a single
coordinate, or in a single function of draws (a sum). By test: how often its condition is among the reasons.
"""


@dataclass(frozen=True)
class Case:
    """A posterior: a model, how it is fitted, and what makes independent draws of it (optional)."""

    build: Callable[[], pm.Model]
    options: dict
    draws: Callable[[int, np.random.Generator], np.ndarray] | None = None
    #: A direction in the unconstrained space; its product with draws is the function that is given an error.
    direction: Callable[[int], np.ndarray] = np.ones
    #: Whether each repeat has a fit of its own.
    is_fitted_anew: bool = False


# --- posteriors -------------------------------------------------------------------------------------------------------

COUNTS = np.random.default_rng(1).poisson(np.random.default_rng(2).gamma(2.0, 2.0, 40))


def rates() -> pm.Model:
    """Of 40 independent rates, logarithms are skewed."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 0.5, shape=len(COUNTS))
        pm.Deterministic("total", rate.sum())
        pm.Poisson("y", rate, observed=COUNTS)
    return model


def draws_of_rates(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.log(rng.gamma(2.0 + COUNTS, 1.0 / 1.5, size=(n, len(COUNTS))))


X = np.random.default_rng(3).normal(size=(60, 12)) @ np.random.default_rng(4).normal(size=(12, 12))
Y = X @ np.linspace(-1.0, 1.0, 12) + np.random.default_rng(5).normal(size=60)


def regression() -> pm.Model:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=12)
        pm.Deterministic("sum", beta.sum())
        pm.Normal("y", X @ beta, 1.0, observed=Y)
    return model


@functools.cache
def moments_of_regression() -> tuple[np.ndarray, np.ndarray]:
    cov = np.linalg.inv(X.T @ X + np.eye(12))
    return cov @ X.T @ Y, cov


def draws_of_regression(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.multivariate_normal(*moments_of_regression(), size=n)


def groups(n_groups: int = 40) -> pm.Model:
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(n_groups), 8)
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-(0.3 + 1.2 * rng.standard_normal(n_groups)[group]))))
    with pm.Model() as model:
        level, s = pm.Normal("level", 0.0, 2.0), pm.HalfNormal("s", 2.0)
        b = pm.Normal("b", 0.0, s, shape=n_groups)
        pm.Deterministic("mean_b", b.mean())
        pm.Bernoulli("y", logit_p=level + b[group], observed=y)
    return model


def walk() -> pm.Model:
    rng = np.random.default_rng(7)
    y = rng.poisson(np.exp(np.cumsum(rng.normal(0.0, 0.3, 60))))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 0.5)
        level = pm.GaussianRandomWalk("level", sigma=scale, init_dist=pm.Normal.dist(0.0, 1.0), steps=59)
        pm.Deterministic("mean_level", level.mean())
        pm.Poisson("y", pm.math.exp(level), observed=y)
    return model


def _of_effects(n_dim: int, n_globals: int) -> np.ndarray:
    return np.r_[np.zeros(n_globals), np.ones(n_dim - n_globals)]


CASES = {
    "rates": Case(rates, {"posterior": "exact"}, draws_of_rates, lambda n: 2.0 + COUNTS),
    "regression": Case(regression, {"posterior": "exact"}, draws_of_regression),
    "groups, trees": Case(groups, {"posterior": "exact"}, direction=lambda n: _of_effects(n, 2), is_fitted_anew=True),
    "walk, nested": Case(walk, {"posterior": "nested"}, direction=lambda n: _of_effects(n, 1), is_fitted_anew=True),
    "regression, Gaussian": Case(regression, {}),
}


# --- errors -----------------------------------------------------------------------------------------------------------


class Changed:
    """A distribution whose draws are others, and whose checks are as they were."""

    def __init__(self, whole: object, make: Callable[[int, np.random.Generator], np.ndarray]) -> None:
        self._whole, self._make = whole, make

    def __getattr__(self, name: str) -> object:
        return getattr(self._whole, name)

    def base(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return self._make(n, rng)

    draw = base


def way_of(where: str, at: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """Return where draws move as their projection on a direction does: along it, or as the posterior has it."""
    return at / (at @ at) if where == "coordinate" else cov @ at / (at @ cov @ at)


def gaussian_with_error(model: pm.Model, error: str, where: str, at: np.ndarray) -> NGVIApproximation:
    """Return a Gaussian with an error; one of limits it can't have."""
    mean, cov = moments_of_regression()
    sd, way = np.sqrt(at @ cov @ at), way_of(where, at, cov)
    shift, factor = ERRORS[error](np.zeros(1))[0], np.diff(ERRORS[error](np.array([0.0, 1.0])))[0]
    linear = np.eye(len(at)) + (factor - 1.0) * np.outer(way, at)
    return NGVIApproximation(
        LogDensity(model), FullState(mean + shift * sd * way, np.linalg.cholesky(linear @ cov @ linear.T))
    )


def judged(case: Case, fitted: NGVIApproximation, error: str, where: str, seed: int) -> making.Diagnosis:
    """Return the diagnosis of draws with an error."""
    rng, n_dim = np.random.default_rng(seed), fitted.density.n_dim
    at = np.eye(n_dim)[rng.integers(n_dim)] if where == "coordinate" else case.direction(n_dim)
    if not case.options:
        return gaussian_with_error(fitted.model, error, where, at).diagnose()
    posterior = fitted._posterior
    whole = posterior.distribution
    some = case.draws(20_000, rng) if case.draws else whole.draw(4_000, rng)
    mean, cov = some.mean(axis=0), np.cov(some.T)
    sd, way = np.sqrt(at @ cov @ at), way_of(where, at, cov)

    def make(n: int, rng: np.random.Generator) -> np.ndarray:
        theta = case.draws(n, rng) if case.draws else whole.base(n, rng)
        along = (theta - mean) @ at
        return theta + np.outer(sd * ERRORS[error](along / sd) - along, way)

    changed = replace(posterior, distribution=Changed(whole, make))
    return making.diagnose(changed, making.budget_of(changed), rng, rng)


# --- runs, and the table ----------------------------------------------------------------------------------------------


def fit_of(case: Case, seed: int) -> NGVIApproximation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pymc_ngvi.fit_ngvi(model=case.build(), random_seed=seed, progressbar=False, **case.options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    for name in options.cases:
        case, fitted = CASES[name], None
        for repeat in range(options.repeats):
            missing = [
                (error, where)
                for error in ERRORS
                for where in ("coordinate", "function")
                if (name, error, where, str(repeat)) not in done
                and not (error == "limits" and not case.options)
                and not (error == "none" and where == "function")
            ]
            if missing and (fitted is None or case.is_fitted_anew):
                fitted = fit_of(case, 1 + repeat)
            for error, where in missing:
                records.append(run(name, case, fitted, error, where, repeat))
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def run(name: str, case: Case, fitted: NGVIApproximation, error: str, where: str, repeat: int) -> dict[str, object]:
    """Judge draws with an error, and return the row."""
    start = time.process_time()
    diagnosis = judged(case, fitted, error, where, 1_000 + repeat)
    seconds = time.process_time() - start
    against = {c.name for c in diagnosis.checks.failed}
    return {
        "case": name,
        "error": error,
        "where": where,
        "repeat": repeat,
        "reliable": int(diagnosis.reliable),
        **{test: int(test in against) for test in TESTS},
        "n_gradients": diagnosis.n_gradients,
        "seconds": seconds,
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "environment": describe_environment(),
    }


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    if not rows:
        return "No results.\n"
    header = ("posterior", "error", "in one", "n", "not reliable", *(f"by {test}" for test in TESTS), "seconds")
    cells = []
    for name in CASES:
        for error in ERRORS:
            for where in ("coordinate", "function"):
                of = [r for r in rows if (r["case"], r["error"], r["where"]) == (name, error, where)]
                if of:
                    cells.append(_cells(name, error, where, of))
    return "\n".join([*measured_on(rows), CAPTION, *table(header, cells), ""])


def _cells(name: str, error: str, where: str, rows: Sequence[Row]) -> list[str]:
    of = column_of(rows)
    shares = [1.0 - of("reliable").mean(), *(of(test).mean() for test in TESTS)]
    where = "-" if error == "none" else where
    return [name, error, where, str(len(rows)), *(f"{s:.2f}" for s in shares), f"{np.median(of('seconds')):.2f}"]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, default=50, help="how many; 0: only the table")
    parser.add_argument("--out", type=Path, default=RESULTS / "verdict_power.csv")
    parser.add_argument(
        "--table", type=Path, default=RESULTS / "verdict_power.md", help="page with marks, or a new file"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
