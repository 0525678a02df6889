"""Figure 1 of Wu and Gardner (2024): Bayesian linear regression on minibatches, natural gradients against gradients.

Hourly rentals of bicycles. Expectations are exact, so that the minibatch is the only noise. KL(q || posterior), in
closed form, and the log loss on the training data, by iteration: of natural gradients with steps 2/(2 + t), the last
iterate and the average, and of gradients in mean and Cholesky factor with the paper's rate. Runs that are in the
results file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with ``bike_sharing_hourly.csv.gz``, the hourly file of UCI's bike sharing data.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870

Examples
--------
::

    python wu_gardner_figure1.py --data DATA
"""

import argparse
import functools
import time

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pymc as pm

from environment import today_and_here
from iterations import iterates, on_independent_batches, recorded, slope_of_mean
from measure import Array
from pages import measured_on, table, write_between_marks
from records import FIGURES, RESULTS, Records, Row

from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.methods import DIRECTIONS, SGD, STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS

mpl.use("Agg")
import matplotlib.pyplot as plt

FILE = "bike_sharing_hourly.csv.gz"
FIELDS = ("method", "seed", "iteration", "divergence", "divergence_last", "loss", "loss_last", "seconds")
FIELDS += ("date", "environment")
COLUMNS = ("season", "yr", "mnth", "hr", "holiday", "weekday", "workingday", "weathersit", "temp", "atemp", "hum")
COLUMNS += ("windspeed",)
BATCH = 1_000
#: The rate of gradient descent is 1 / (1e5 + t).
FIRST_RATE = 1e-5
CONSTANT_STEP = 0.05
#: Runs of each method: the last two are not in the paper.
RUNS = {"NGD": 20, "SGD": 20, "NGD, passes": 5, "NGD, constant": 5}
SHOWN = (1, 10, 100, 300, 1_000)


@dataclass(frozen=True, eq=False)
class Linear:
    """Linear regression with priors N(0, 1) and noise of variance 1: the posterior is Gaussian.

    Parameters
    ----------
    design : array, (n, d)
    y : array, (n,)
    """

    design: Array
    y: Array

    @property
    def n_dim(self) -> int:
        """Number of coefficients."""
        return self.design.shape[1]

    def model(self) -> pm.Model:
        """Return the model on minibatches."""
        with pm.Model() as model:
            x, y = pm.Minibatch(self.design, self.y, batch_size=BATCH)
            beta = pm.Normal("beta", 0, 1, shape=self.n_dim)
            pm.Normal("y", x @ beta, 1, observed=y, total_size=len(self.y))
        return model

    @functools.cached_property
    def precision(self) -> Array:
        """Return that of the posterior."""
        return np.eye(self.n_dim) + self.design.T @ self.design

    @functools.cached_property
    def mean(self) -> Array:
        """Return that of the posterior."""
        return np.linalg.solve(self.precision, self.design.T @ self.y)

    def divergence(self, q: GaussianState) -> float:
        """Return KL(q || posterior)."""
        apart, whitened = q.mean() - self.mean, q.whiten(q.whiten(self.precision).T)
        log_det = np.linalg.slogdet(whitened)[1]
        return float(0.5 * (np.trace(whitened) - self.n_dim - log_det + apart @ self.precision @ apart))

    def loss(self, q: GaussianState) -> float:
        """Return the mean over rows of -log of the predictive density, above that of the posterior."""
        return -self.best_loss + self.loss_of(q.mean(), (q.whiten(self.design) ** 2).sum(axis=1))

    def loss_of(self, mean: Array, variance: Array) -> float:
        """Return it for a mean of the coefficients, and variances of the predictors of rows."""
        total = 1.0 + variance
        return float(0.5 * np.mean(np.log(2.0 * np.pi * total) + (self.y - self.design @ mean) ** 2 / total))

    @functools.cached_property
    def best_loss(self) -> float:
        """Return the loss of the posterior."""
        spread = np.linalg.solve(np.linalg.cholesky(self.precision), self.design.T)
        return self.loss_of(self.mean, (spread**2).sum(axis=0))


def bike(data: Path) -> Linear:
    """Return twelve columns as they are in the file and the number of rentals, all standardised, and an intercept."""
    frame = pd.read_csv(data / FILE)
    x, y = frame[list(COLUMNS)].to_numpy(float), frame["cnt"].to_numpy(float)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return Linear(np.column_stack([np.ones(len(x)), x]), (y - y.mean()) / y.std())


class PaperSGD(SGD):
    """Gradient descent in mean and Cholesky factor with the rate 1 / (1e5 + t)."""

    def _decayed(self, first: float, t: int) -> float:
        return 1.0 / (1.0 / first + t)


def rule_of(method: str, density: LogDensity, seed: int) -> Any:
    """Return a step rule: every expectation is exact with one antithetic pair, for log p is quadratic."""
    shared = {"seed": seed, "n_draws": 2, "base_draws": "antithetic"}
    update = "euclidean" if method == "SGD" else "natural"
    parts = density, UPDATES[update], ESTIMATORS["price"]
    if method == "SGD":
        return PaperSGD(*parts, direction=DIRECTIONS[update], step_size=FIRST_RATE, **shared)
    if method == "NGD, constant":
        return STEPS["constant"](*parts, step_size=CONSTANT_STEP, **shared)
    return STEPS["decay"](*parts, **shared)


def run(data: Linear, n_steps: int, records: Records) -> None:
    """Take steps on batches of independent rows, as in the paper, or of passes, as the package has them."""
    paper, passes = on_independent_batches(data.model()), LogDensity(data.model())
    done = {(row["method"], int(row["seed"])) for row in records.read()}
    shared = today_and_here()
    keep = recorded(n_steps, 40) | {t for t in SHOWN if t < n_steps}
    for method, n_runs in RUNS.items():
        for seed in range(1, n_runs + 1):
            if (method, seed) in done:
                continue
            start, found = time.process_time(), []
            rule = rule_of(method, passes if method == "NGD, passes" else paper, seed)
            for t, state in iterates(rule, FullState(np.zeros(data.n_dim), np.eye(data.n_dim)), n_steps):
                if t in keep:
                    pair = state.q, state.iterate
                    found.append([t, *map(data.divergence, pair), *map(data.loss, pair)])
            seconds = round(time.process_time() - start, 2)
            for values in found:
                numbers = [float(f"{value:.6g}") for value in values]
                row = dict(zip(FIELDS[2:7], [values[0], *numbers[1:]], strict=True))
                records.append({"method": method, "seed": seed} | row | {"seconds": seconds} | shared)
            print(f"{method}, seed {seed}: {found[-1]}, {seconds} processor seconds", flush=True)


# --- figure and tables ------------------------------------------------------------------------------------------------

#: Method, whether it is the last iterate, and label and style of the line.
LINES = (
    ("NGD", False, "NGD, average", "C0-"),
    ("NGD", True, "NGD, last iterate", "C0--"),
    ("SGD", False, "SGD", "C3-"),
    ("NGD, constant", False, f"NGD, constant step {CONSTANT_STEP:g}", "C7-"),
    ("NGD, passes", False, "NGD, average, passes", "C2-"),
    ("NGD, passes", True, "NGD, last iterate, passes", "C2--"),
)


def _frame(rows: list[Row]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    return frame.astype({"seed": int, "iteration": int} | dict.fromkeys(FIELDS[3:8], float))


def _runs(frame: pd.DataFrame, method: str, value: str) -> pd.DataFrame:
    """Return values, a row for each iteration and a column for each run."""
    return frame[frame["method"] == method].pivot_table(index="iteration", columns="seed", values=value)


def draw(frame: pd.DataFrame, out: Path) -> None:
    """Draw means over runs against iterations."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    for method, last, label, style in LINES:
        runs = _runs(frame, method, "divergence_last" if last else "divergence")
        runs = runs[runs.index > 0]
        mean, low, high = runs.mean(axis=1), runs.quantile(0.1, axis=1), runs.quantile(0.9, axis=1)
        left.plot(mean.index, mean, style, label=label)
        left.fill_between(mean.index, low, high, alpha=0.15, color=style[:2], linewidth=0)
        if (method, last) == ("NGD", False):
            line = mean.iloc[-1] * mean.index[-1] / mean.index
            left.plot(mean.index, line, "k:", linewidth=1, label="slope -1")
        if "passes" not in method:
            losses = _runs(frame, method, "loss_last" if last else "loss").mean(axis=1)
            right.plot(losses.index[1:], losses.iloc[1:], style, label=label)
    left.set(ylabel="mean KL(q || posterior), nats")
    right.set(ylabel="training log loss above the posterior's, nats a row")
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", xlabel="iterations")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def tables(frame: pd.DataFrame, data: Linear, rows: list[Row]) -> str:
    """Return the mean divergence by iteration, its slope, and the loss."""
    last = int(frame["iteration"].max())
    columns = [*SHOWN, last]
    header = ["", "runs", *(f"T = {t:,}" for t in columns), "slope of the last decade", "seconds a run"]
    body, losses = [], []
    for method, is_last, label, _ in LINES:
        runs = _runs(frame, method, "divergence_last" if is_last else "divergence")
        slope = slope_of_mean(runs[runs.index >= last / 10])
        seconds = frame.loc[frame["method"] == method, "seconds"].median()
        mean = runs.mean(axis=1)
        body.append([label, runs.shape[1], *(f"{mean[t]:.3g}" for t in columns), slope, f"{seconds:.1f}"])
        mean = _runs(frame, method, "loss_last" if is_last else "loss").mean(axis=1)
        losses.append([label, *(f"{mean[t]:.2g}" for t in columns)])
    first = _runs(frame, "NGD", "divergence").mean(axis=1)
    gradients = _runs(frame, "SGD", "divergence").mean(axis=1)
    reached = gradients.index[gradients < first[10]]
    when = f"{reached[0]:,}" if len(reached) else f"more than {last:,}"
    lines = [*measured_on(rows), f"Mean KL(q || posterior) over runs, in nats; at the start, {first[0]:,.1f}:", ""]
    lines += [*table(header, body), "", f"NGD after 10 iterations: {first[10]:.3g} nats (average). SGD is below that "]
    lines[-1] += f"from iteration {when} on, of those that were looked at; after 300, it has {gradients[300]:.3g}."
    lines += [
        "",
        f"Training log loss, mean over runs, in nats a row; that of the posterior is {data.best_loss:.6f}:",
        "",
    ]
    return "\n".join(lines + table(["", *(f"T = {t:,}" for t in columns)], losses)) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, draw the figure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv and tables")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    if not (options.data / FILE).exists():
        raise SystemExit(f"There is no {FILE} in {options.data}: nothing to do.")
    data, records = bike(options.data), Records(options.out / "wu_gardner_figure1.csv", FIELDS)
    run(data, options.steps, records)
    rows = records.read()
    frame = _frame(rows)
    write_between_marks(options.out / "wu_gardner_figures.md", tables(frame, data, rows), Path(__file__).name)
    draw(frame, options.figures / "wu_gardner_figure1.png")


if __name__ == "__main__":
    main()
