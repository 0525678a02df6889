"""Simulation-based calibration of moved posteriors: the ranks of true parameters among draws.

As in ``calibration_exact.py``: parameters from the prior, data from the model given these, a fit, and the rank of each
true value among draws, of coordinates and of Deterministics. The Gaussian fit at which the chains begin is judged
beside it. Fits whose chains do not arrive are counted: their data sets have ranks of the Gaussian only. Nothing is
compiled anew for a data set. A run can be stopped and resumed. From a checkout that is not installed, set
``PYTHONPATH`` to its root.

Examples
--------
::

    python calibration_moved.py
    python calibration_moved.py --models rare --datasets 20 --out small.csv --table small.md
    python calibration_moved.py --datasets 0
"""

import argparse
import datetime
import json
import logging
import time
import warnings

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from calibration_exact import LEVELS, MAX_DATASETS, N_BINS, SIMULATION_SEED, covered, uniformity
from environment import describe_environment
from measure import Array
from pages import column_of, measured_on, median, table, write_between_marks
from records import Records, Row

#: Few enough to be nearly independent: no fit is accepted with effective sizes below 400.
N_DRAWS = 199
#: Of the designs, and of the draws, plus the number of the data set.
DESIGN_SEED, DRAWS_SEED = 5, 100_000
POSTERIORS = ("moved", "gaussian")
KEY = ("model", "dataset")
FIELDS = (
    *KEY, "has_arrived", "verdict", "rhat", "effective_size", "gradients", "cpu_seconds", "moved", "gaussian", "date",
    "environment",
)  # fmt: skip

CAPTION = f"""\
Ranks among {N_DRAWS} draws. Arrived: the others were refused, with an error. Processor seconds of a whole fit, nothing
compiled.
"""

ABOUT_RANKS = f"""\
Data sets whose chains have arrived. Share of central intervals that hold the true value, in percent, with the standard
error at the nominal level; mean rank over {N_DRAWS}, which is .5 ± .289 / sqrt(data sets) without bias, and its
standard deviation, .289 where ranks are uniform and more where intervals are too narrow; P values of tests of
uniformity, chi-squared with {N_BINS} bars, and of Kolmogorov and Smirnov. Elements of a vector are counted together; of
their P values, the smallest is shown, times their number.
"""


def rare() -> pm.Model:
    """Return a logistic regression of 200 persons with 20 predictors and some 20 events."""
    x = np.random.default_rng(DESIGN_SEED).normal(size=(200, 20))
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    with pm.Model() as model:
        data = pm.Data("data", (np.arange(200) % 10 == 0).astype(int))
        level, slope = pm.Normal("level", -2.5, 0.5), pm.Normal("slope", 0.0, 0.5, shape=20)
        eta = level + x @ slope
        pm.Deterministic("risk", pm.math.sigmoid(eta[:3]))
        pm.Deterministic("total", pm.math.sigmoid(eta).sum())
        pm.Bernoulli("y", logit_p=eta, observed=data)
    return model


def saturation(n: int = 100, n_lags: int = 5) -> pm.Model:
    """Return weekly sales: two channels with a carry-over and a saturation, and a trend."""
    rng = np.random.default_rng(DESIGN_SEED)
    spend = rng.gamma(2.0, 0.5, (n, 2)) * (rng.random((n, 2)) < 0.7)
    lagged = np.stack([np.vstack([np.zeros((k, 2)), spend[: n - k]]) for k in range(n_lags)])
    time_, lags = np.linspace(-1.0, 1.0, n), np.arange(n_lags)[:, None]
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(n))
        level, trend = pm.Normal("level", 0.0, 1.0), pm.Normal("trend", 0.0, 0.5)
        keep, rate = pm.Beta("keep", 2, 3, shape=2), pm.Gamma("rate", 3, 3, shape=2)
        size, noise = pm.HalfNormal("size", 1.0, shape=2), pm.HalfNormal("noise", 0.5)
        weights = keep**lags
        carried = (weights[:, None] / weights.sum(axis=0) * lagged).sum(axis=0)
        each = size * (1.0 - pt.exp(-rate * carried))
        pm.Deterministic("channel", each.sum(axis=0))
        pm.Deterministic("share", each[:, 0].sum() / each.sum())
        pm.Normal("y", level + trend * time_ + each.sum(axis=1), noise, observed=data)
    return model


def near_binomial(n: int = 40) -> pm.Model:
    """Return a beta-binomial regression whose dispersion is often near 0, where it is binomial."""
    rng = np.random.default_rng(DESIGN_SEED)
    size, x = rng.integers(20, 60, n), rng.normal(size=(n, 4))
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(n, dtype=int))
        level, slope = pm.Normal("level", -1.0, 1.0), pm.Normal("slope", 0.0, 0.7, shape=4)
        precision = pm.HalfCauchy("precision", 50.0)
        mean = pm.math.sigmoid(level + x @ slope)
        pm.Deterministic("total", (size * mean).sum())
        pm.Deterministic("odds", pt.exp(slope[0]))
        pm.Deterministic("deviation", pt.sqrt(mean[0] * (1.0 - mean[0]) / (1.0 + precision)))
        pm.BetaBinomial("y", alpha=mean * precision, beta=(1.0 - mean) * precision, n=size, observed=data)
    return model


MODELS: dict[str, tuple[str, Callable[[], pm.Model]]] = {
    "rare": ("logistic, 20 predictors, few events", rare),
    "saturation": ("carry-over and saturation", saturation),
    "near_binomial": ("beta-binomial near its bound", near_binomial),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what is missing and write the tables."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    experiments = {name: Experiment(name) for name in options.models} if options.datasets else {}
    for i in range(options.datasets):  # all models at the same pace: a run that is stopped has something of each
        for name, experiment in experiments.items():
            if (name, str(i)) not in done:
                row = {**dict(zip(KEY, (name, i), strict=True)), **experiment.run(i)}
                date = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": date, "environment": describe_environment()})
                print(f"{name} {i}: {row['verdict']} {row['cpu_seconds']:.1f} s", flush=True)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


class Experiment:
    """The simulated data sets of one model, and what fits them: built with the first, serves for all.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        from pymc_ngvi import NGVI

        self.model = MODELS[name][1]()
        self.names = [v.name for v in (*self.model.free_RVs, *self.model.deterministics)]
        with self.model:
            simulated = pm.sample_prior_predictive(
                MAX_DATASETS,
                var_names=[*self.names, "y"],
                random_seed=SIMULATION_SEED,
                compile_kwargs={"mode": "FAST_COMPILE"},
            )
        self.truth = {name: simulated["prior"][name].to_numpy()[0] for name in self.names}
        self.data = simulated["prior_predictive"]["y"].to_numpy()[0]
        self.inference = NGVI(self.model, posterior="moved")

    def run(self, i: int) -> dict[str, object]:
        """Fit data set ``i`` and return what is to be recorded."""
        from pymc_ngvi import NotExactError

        with self.model, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pm.set_data({"data": self.data[i]})
            self.inference.configure(random_seed=i)
            start = time.process_time()
            try:
                moved: Any = self.inference.fit(progressbar=False)
            except NotExactError as error:
                seconds, gaussian = time.process_time() - start, error.approx
                return {
                    "has_arrived": 0,
                    "verdict": str(error),
                    "cpu_seconds": seconds,
                    **self._ranks(i, None, gaussian),
                }
            seconds, checks = time.process_time() - start, moved.checks
        return {
            "has_arrived": 1,
            "verdict": moved.record.posterior,
            "rhat": checks.rhat,
            "effective_size": checks.effective_size,
            "gradients": checks.n_gradients,
            "cpu_seconds": seconds,
            **self._ranks(i, moved, moved.gaussian),
        }

    def _ranks(self, i: int, *approximations: Any) -> dict[str, object]:
        return {
            name: None if approx is None else json.dumps(self.ranks(approx, i))
            for name, approx in zip(POSTERIORS, approximations, strict=True)
        }

    def ranks(self, approx: Any, i: int) -> dict[str, list[int]]:
        """Return the ranks of the elements of each parameter and Deterministic among draws, from 0 to their number."""
        draws = approx.sample(N_DRAWS, chains=1, random_seed=DRAWS_SEED + i)["posterior"]
        below = {name: draws[name].to_numpy()[0] < self.truth[name][i] for name in self.names}
        return {name: np.atleast_1d(of.sum(axis=0)).ravel().tolist() for name, of in below.items()}


# --- tables -----------------------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    by_model = {name: own for name in MODELS if (own := [row for row in rows if row["model"] == name])}
    header = ("model", "data sets", "arrived", "nested R-hat", "effective size", "gradients", "seconds")
    lines = [*measured_on(rows), CAPTION, *table(header, [_fits(name, own) for name, own in by_model.items()]), ""]
    ranked = [line for name, own in by_model.items() for line in _ranked(name, own)]
    header = ("model", "quantity", "posterior", *(f"{level:.0%}" for level in LEVELS), "mean rank", "sd", "P, chi2")
    lines += [ABOUT_RANKS, *table((*header, "P, KS"), [line for line, _ in ranked]), ""]
    for posterior in POSTERIORS:
        chances = np.concatenate([chance for line, chance in ranked if line[2] == posterior])
        least = min(float(chances.min()) * chances.size, 1.0)
        lines.append(f"The smallest of all {chances.size} P values, times their number, {posterior}: {least:.2g}.")
    return "\n".join([*lines, ""])


def _fits(name: str, rows: Sequence[Row]) -> list[object]:
    of = column_of(rows)
    return [
        MODELS[name][0],
        len(rows),
        int(of("has_arrived").sum()),
        median(of("rhat"), ".3f"),
        median(of("effective_size"), ",.0f"),
        median(of("gradients"), ",.0f"),
        median(of("cpu_seconds"), ".2f"),
    ]


def ranks_of(rows: Sequence[Row], posterior: str) -> dict[str, Array]:
    """Return the ranks of each quantity, (n_datasets, n_elements)."""
    found = [json.loads(row[posterior]) for row in rows]
    return {name: np.array([of[name] for of in found]) for name in found[0]} if found else {}


def _ranked(name: str, rows: Sequence[Row]) -> list[tuple[list[object], Array]]:
    """Return lines of the table, each with the P values that it stands for."""
    lines = []
    arrived = [row for row in rows if int(row["has_arrived"])]
    by_posterior = {posterior: ranks_of(arrived, posterior) for posterior in POSTERIORS}
    for quantity, size in ((q, of.shape[1]) for q, of in by_posterior["moved"].items()):
        for posterior, of_all in by_posterior.items():
            ranks = of_all[quantity]
            spread = [100.0 * np.sqrt(level * (1.0 - level) / len(ranks)) for level in LEVELS]
            shares = [
                f"{100 * covered(ranks, b, N_DRAWS):.1f} ± {se:.1f}" for b, se in zip(LEVELS, spread, strict=True)
            ]
            part = (ranks + 0.5) / (N_DRAWS + 1)
            chances = np.array([uniformity(of, N_DRAWS) for of in ranks.T])
            least = np.minimum(size * chances.min(axis=0), 1.0)
            figures = [f"{part.mean():.3f}", f"{part.std():.3f}", *(f"{p:.2g}" for p in least)]
            label = f"`{quantity}`" + (f" ({size})" if size > 1 else "")
            lines.append(([MODELS[name][0], label, posterior, *shares, *figures], chances.ravel()))
    return lines


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    results = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--datasets", type=int, choices=range(MAX_DATASETS + 1), default=200, metavar="N", help="0: only the tables"
    )
    parser.add_argument("--out", type=Path, default=results / "calibration_moved.csv")
    parser.add_argument("--table", type=Path, default=results / "calibration.md", help="page with marks, or a new file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    main()
