"""A sparse Gaussian process as a Bayesian linear regression, as in section 4.2 of Wu and Gardner (2024).

Hourly rentals of bicycles, a Gaussian process with fixed hyperparameters and 100 inducing points. Given these, the
variational posterior of the inducing values u is that of the regression y = X u + noise with X = K_fu K_uu^-1 and prior
N(0, K_uu); Titsias (2009) has it in closed form, which stands here in NumPy. Two questions: does one natural step of
size 1 on all the data reach it, and do steps of size 2/(2 + t) on minibatches approach it at the rate 1/T? From a
checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with ``bike_sharing_hourly.csv.gz``, the hourly file of UCI's bike sharing data.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
.. [2] M. K. Titsias (2009). Variational learning of inducing variables in sparse Gaussian processes. AISTATS.

Examples
--------
::

    python svgp.py --data DATA
"""

import argparse
import functools
import time
import warnings

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pymc as pm

from environment import today_and_here
from iterations import iterates, on_independent_batches, recorded
from measure import Array
from pages import measured_on, table, write_between_marks
from records import FIGURES, RESULTS, Records
from scipy.cluster.vq import kmeans2
from scipy.linalg import cho_factor, cho_solve

from pymc_ngvi import ConvergenceWarning, fit_ngvi
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.methods import STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS

mpl.use("Agg")
import matplotlib.pyplot as plt

FILE = "bike_sharing_hourly.csv.gz"
FIELDS = ("rows", "seed", "q", "iteration", "divergence", "date", "environment")
N_INDUCING, LENGTH, NOISE, JITTER, BATCH = 100, 1.5, 0.5, 1e-4, 1_000
#: Columns of the table.
SHOWN = (1, 10, 100, 1_000)


@dataclass(frozen=True)
class SparseProcess:
    """A Gaussian process of variance 1 with a squared exponential kernel, seen at inducing points.

    Parameters
    ----------
    x : array, (n, n_features)
        Inputs.
    y : array, (n,)
        Responses.
    inducing : array, (n_inducing, n_features)
        Inducing points.
    length, noise : float
        Length scale, and standard deviation of the noise.
    """

    x: Array
    y: Array
    inducing: Array
    length: float = LENGTH
    noise: float = NOISE

    def _kernel(self, a: Array, b: Array) -> Array:
        squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * a @ b.T
        return np.exp(-0.5 * np.maximum(squared, 0.0) / self.length**2)

    @functools.cached_property
    def prior_cov(self) -> Array:
        """Return K_uu."""
        return self._kernel(self.inducing, self.inducing) + JITTER * np.eye(len(self.inducing))

    @functools.cached_property
    def cross(self) -> Array:
        """Return K_fu."""
        return self._kernel(self.x, self.inducing)

    @functools.cached_property
    def design(self) -> Array:
        """Return X = K_fu K_uu^-1."""
        return cho_solve(cho_factor(self.prior_cov), self.cross.T).T

    def model(self, batch_size: int | None = None) -> pm.Model:
        """Return the regression as a PyMC model, on all rows or on minibatches."""
        with pm.Model() as model:
            x, y = self.design, self.y
            if batch_size is not None:
                x, y = pm.Minibatch(x, y, batch_size=batch_size)
            u = pm.MvNormal("u", np.zeros(len(self.inducing)), chol=np.linalg.cholesky(self.prior_cov))
            pm.Normal("y", x @ u, self.noise, observed=y, total_size=None if batch_size is None else len(self.y))
        return model

    @functools.cached_property
    def posterior(self) -> tuple[Array, Array]:
        """Return mean and covariance of q(u) of Titsias, from K_uu and K_fu alone."""
        inner = cho_factor(self.prior_cov + self.cross.T @ self.cross / self.noise**2)
        mean = self.prior_cov @ cho_solve(inner, self.cross.T @ self.y) / self.noise**2
        cov = self.prior_cov @ cho_solve(inner, self.prior_cov)
        return mean, (cov + cov.T) / 2.0

    @functools.cached_property
    def precision(self) -> Array:
        """Return the inverse of the posterior covariance."""
        inverse = np.linalg.inv(self.prior_cov)
        precision = inverse + self.design.T @ self.design / self.noise**2
        return (precision + precision.T) / 2.0

    def divergence(self, q: GaussianState) -> float:
        """Return KL(q || posterior)."""
        apart = q.mean() - self.posterior[0]
        factor = np.linalg.cholesky(self.precision)
        half = factor.T @ np.linalg.cholesky(q.cov())
        spread = (half**2).sum() - len(apart) - np.linalg.slogdet(half @ half.T)[1]
        return float(0.5 * (spread + ((factor.T @ apart) ** 2).sum()))

    def difference(self, q: GaussianState) -> tuple[float, float]:
        """Return the largest difference from the posterior of a mean, and of a covariance, in posterior sds."""
        mean, cov = self.posterior
        sd = np.sqrt(np.diag(cov))
        return float(np.max(abs(q.mean() - mean) / sd)), float(np.max(abs(q.cov() - cov) / np.outer(sd, sd)))


def bike(data: Path) -> SparseProcess:
    """Return rentals by hour (on a circle), season, working day, weather, temperature, humidity and wind."""
    frame = pd.read_csv(data / FILE)
    angle = 2.0 * np.pi * frame["hr"] / 24.0
    columns = [np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)]
    columns += [frame[name] for name in ("yr", "season", "workingday", "weathersit", "temp", "hum", "windspeed")]
    x = np.column_stack(columns).astype(float)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y = np.log(frame["cnt"].to_numpy(float))
    inducing, _ = kmeans2(x, N_INDUCING, seed=1, minit="points")
    return SparseProcess(x, (y - y.mean()) / y.std(), inducing)


def one_step(process: SparseProcess) -> GaussianState:
    """Return q after one natural step of size 1 on all rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a fit of one step does not know that it is done
        approx = fit_ngvi(
            1,
            model=process.model(),
            family="full",
            update="natural",
            step="constant",
            step_size=1.0,
            posterior="gaussian",
            random_seed=1,
            progressbar=False,
        )
    return approx.q


def run(process: SparseProcess, n_steps: int, rows: str, n_seeds: int, records: Records) -> None:
    """Take steps 2/(2 + t) on minibatches, and keep the divergence of average and last iterate.

    Rows are "independent", as in the paper, or those of "passes" through the data, as the package has it.
    """
    model = process.model(BATCH)
    density = on_independent_batches(model) if rows == "independent" else LogDensity(model)
    done = {row["seed"] for row in records.read() if row["rows"] == rows}
    shared = today_and_here()
    keep = recorded(n_steps)
    for seed in range(1, n_seeds + 1):
        if str(seed) in done:
            continue
        start = time.process_time()
        rule = STEPS["decay"](
            density, UPDATES["natural"], ESTIMATORS["price"], seed=seed, n_draws=2, base_draws="antithetic"
        )
        found = []
        for t, state in iterates(rule, FullState(np.zeros(N_INDUCING), np.linalg.cholesky(process.prior_cov)), n_steps):
            if t in keep:
                found += [(t, "average", process.divergence(state.q))]
                found += [(t, "last iterate", process.divergence(state.iterate))]
        for t, name, value in found:
            values = {"rows": rows, "seed": seed, "q": name, "iteration": t, "divergence": float(f"{value:.5g}")}
            records.append(values | shared)
        print(
            f"{rows}, seed {seed}: {found[-2][2]:.4g}, {time.process_time() - start:.1f} processor seconds", flush=True
        )


def slope(frame: pd.DataFrame, first: float) -> str:
    """Return mean and standard error over seeds of the slope, on logarithmic axes, from an iteration on."""
    part = frame[frame["iteration"] >= first]
    slopes = [np.polyfit(np.log(one["iteration"]), np.log(one["divergence"]), 1)[0] for _, one in part.groupby("seed")]
    return f"{np.mean(slopes):.2f} ± {np.std(slopes, ddof=1) / np.sqrt(len(slopes)):.2f}"


def draw(frame: pd.DataFrame, out: Path) -> None:
    """Draw the mean divergence over seeds against iterations."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for number, ((rows, name), part) in enumerate(frame[frame["iteration"] > 0].groupby(["rows", "q"], sort=False)):
        groups = part.groupby("iteration")["divergence"]
        mean, error = groups.mean(), groups.sem()
        axis.plot(
            mean.index,
            mean,
            color=f"C{number}",
            label=f"{rows} rows, {name}" if rows == "independent" else f"{rows}, {name}",
        )
        axis.fill_between(mean.index, mean - 2 * error, mean + 2 * error, alpha=0.2, color=f"C{number}", linewidth=0)
        if number == 0:
            line = mean.iloc[-1] * mean.index[-1] / mean.index
            axis.plot(mean.index, line, "k:", linewidth=1, label="slope -1")
    axis.set(xscale="log", yscale="log", xlabel="iterations T", ylabel="mean KL(q || posterior), nats")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def tables(process: SparseProcess, records: Records) -> str:
    """Return what one step leaves, and the divergence by iteration."""
    rows = records.read()
    frame = pd.DataFrame(rows)
    for name in ("iteration", "divergence"):
        frame[name] = pd.to_numeric(frame[name])
    q = one_step(process)
    mean, cov = process.difference(q)
    lines = [*measured_on(rows), "After one step of size 1 on all rows, in posterior standard deviations:", ""]
    lines += table(
        ["KL of q from the posterior, nats", "largest difference of a mean", "of an entry of the covariance"],
        [[f"{abs(process.divergence(q)):.1g}", f"{mean:.1g}", f"{cov:.1g}"]],
    )
    last = int(frame["iteration"].max())
    columns = [min(keep for keep in sorted(recorded(last)) if keep >= t) for t in SHOWN] + [last]
    header = ["rows", "q", "runs", *(f"T = {t:,}" for t in columns), "slope of the last decade", "of the last two"]
    body = []
    for (rows_of, name), part in frame[frame["iteration"] > 0].groupby(["rows", "q"], sort=False):
        middle = part.groupby("iteration")["divergence"].mean()
        values = [f"{middle[t]:.3g}" for t in columns]
        body.append([rows_of, name, part["seed"].nunique(), *values, slope(part, last / 10), slope(part, last / 100)])
    lines += ["", "Mean KL(q || posterior) over runs, in nats, on minibatches:", "", *table(header, body)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw the figure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--seeds", type=int, default=6, help="with independent rows; half as many with passes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv and tables")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    if not (options.data / FILE).exists():
        raise SystemExit(f"There is no {FILE} in {options.data}: nothing to do.")
    process, records = bike(options.data), Records(options.out / "svgp.csv", FIELDS)
    run(process, options.steps, "independent", options.seeds, records)
    run(process, options.steps, "passes", -(-options.seeds // 2), records)
    write_between_marks(options.out / "svgp.md", tables(process, records), Path(__file__).name)
    frame = pd.DataFrame(records.read()).astype({"iteration": int, "divergence": float})
    draw(frame, options.figures / "svgp.png")


if __name__ == "__main__":
    main()
