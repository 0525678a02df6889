"""Figure 2 of Wu and Gardner (2024): Bayesian logistic regression, natural gradients against gradients.

Mushroom and MNIST, 1 against 7, with the step sizes of the paper and ten draws: gradients with respect to the natural
parameters, and to mean and Cholesky factor, both with Hessians at the draws (Price) or with gradients alone
(reparametrisation). The paper does not say whether it takes minibatches: here are all rows, and batches. The loss is a
sum of one-dimensional integrals, so that it has no noise, and neither has the optimum. Runs that are in the results
file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with ``mushroom_onehot.csv.gz`` and ``mnist_1vs7_train.csv.gz``.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870

Examples
--------
::

    python wu_gardner_figure2.py --data DATA
    python wu_gardner_figure2.py --data DATA --sets mushroom
"""

import argparse
import time

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd

from environment import today_and_here
from iterations import iterates, on_independent_batches, recorded
from logistic_regression import Logistic
from pages import measured_on, table, write_between_marks
from records import FIGURES, RESULTS, Records, Row
from rows_models import DESIGNS
from wu_gardner import Counted

from pymc_ngvi import fit_ngvi
from pymc_ngvi.density import LogDensity
from pymc_ngvi.methods import DIRECTIONS, STEPS, UPDATES
from pymc_ngvi.methods.estimators import pathwise, price

mpl.use("Agg")
import matplotlib.pyplot as plt

FIELDS = ("data", "rows", "method", "estimator", "step_size", "seed", "iteration", "loss", "lost", "seconds")
FIELDS += ("date", "environment")
#: Columns that name one run.
KEYS = FIELDS[:6]
BATCH, N_DRAWS = 1_000, 10
#: Objects of their own: with the registry's, steps measure how much is left to gain, by five times as many Hessians.
ESTIMATES = {"price": price, "pathwise": pathwise}
#: Nats of loss from which a run has diverged.
DIVERGED = 1e10


class Setting(NamedTuple):
    """What is run on a data set.

    Parameters
    ----------
    label : str
    step_sizes : dict
        Of each method, those of the paper.
    n_steps, n_kept, n_seeds : int
        Iterations of a run, about how many of these are scored, and runs.
    """

    label: str
    step_sizes: dict[str, tuple[float, ...]]
    n_steps: int
    n_kept: int
    n_seeds: int


SETTINGS = {
    "mushroom": Setting("Mushroom", {"NGD": (0.5, 0.1, 0.01, 0.001), "SGD": (1e-3, 1e-4, 1e-5, 1e-6)}, 500, 32, 3),
    "mnist": Setting("MNIST, 1 against 7", {"NGD": (0.1, 0.01, 0.001), "SGD": (1e-5, 1e-6, 1e-7)}, 100, 14, 1),
}


class Runs:
    """What has been run on a data set, and what is to be.

    Parameters
    ----------
    name : str
        Of `SETTINGS`.
    data : Logistic
    path : Path
        Of the results.
    """

    def __init__(self, name: str, data: Logistic, path: Path) -> None:
        self.name, self.data, self.setting = name, data, SETTINGS[name]
        self.records = Records(path, FIELDS)
        self.shared = today_and_here()
        self.done = {tuple(row[key] for key in KEYS) for row in self.records.read()}

    def missing(self) -> None:
        """Run what is missing."""
        for method, find in {"optimum": self.optimum, "default": self.default}.items():
            key = (self.name, "all", method, "quadrature", "", "")
            if key not in self.done:
                self.keep(key, find())
        for rows in ("all", f"{BATCH:,}"):
            density = self.density(None if rows == "all" else BATCH)
            for method, step_sizes in self.setting.step_sizes.items():
                for estimator in ESTIMATES:
                    for step_size in step_sizes:
                        for seed in range(1, 1 + self.setting.n_seeds):
                            key = (self.name, rows, method, estimator, f"{step_size:g}", str(seed))
                            if key not in self.done:
                                self.keep(key, self.scored(density, *key[2:4], step_size, seed))

    def density(self, batch: int | None) -> LogDensity:
        """Return log p, on batches of independent rows if these are asked for."""
        model = self.data.model(batch)
        return LogDensity(model) if batch is None else on_independent_batches(model)

    def optimum(self) -> Iterator[tuple[int, float, int]]:
        """Yield the loss of the best Gaussian, by natural steps without noise."""
        yield 0, self.data.least_loss(), 0

    def default(self) -> Iterator[tuple[int, float, int]]:
        """Yield iterations and loss of a fit with the package's defaults."""
        approx = fit_ngvi(model=self.data.model(), posterior="gaussian", random_seed=1, progressbar=False)
        yield approx.record.n_iterations, self.data.loss(approx.q), 0

    def scored(
        self, density: LogDensity, method: str, estimator: str, step_size: float, seed: int
    ) -> Iterator[tuple[int, float, int]]:
        """Yield iteration, loss, and steps so far that would not have left a positive definite precision."""
        update = Counted() if method == "NGD" else UPDATES["euclidean"]
        rule = STEPS["constant" if method == "NGD" else "sgd"](
            density,
            update,
            ESTIMATES[estimator],
            direction=DIRECTIONS["euclidean"],
            seed=seed,
            n_draws=N_DRAWS,
            base_draws="plain",
            stl=False,
            step_size=step_size,
        )
        n = self.setting.n_steps
        keep = recorded(n, self.setting.n_kept)
        with np.errstate(all="ignore"):  # a run that diverges
            for t, state in iterates(rule, self.data.start(), n):
                if t in keep:
                    loss = self.data.loss(state.q)
                    diverged = not loss < DIVERGED or state.n_failed >= BATCH
                    yield t, np.inf if diverged else loss, getattr(update, "n_lost", 0)
                    if diverged:
                        return

    def keep(self, key: tuple[str, ...], found: Iterator[tuple[int, float, int]]) -> None:
        """Keep what is found."""
        start = time.process_time()
        rows = list(found)
        seconds = round(time.process_time() - start, 2)
        for t, loss, lost in rows:
            values = {"iteration": t, "loss": loss, "lost": lost, "seconds": seconds}
            self.records.append(dict(zip(KEYS, key, strict=True)) | values | self.shared)
        print(*key, rows[-1], f"{seconds} s", flush=True)


# --- figures and tables -----------------------------------------------------------------------------------------------

COLOURS = ("C3", "C1", "C2", "C0")
STYLES = {"price": "-", "pathwise": "--"}
NAMES = {"price": "Price", "pathwise": "reparametrisation"}
#: Nats above the least loss that the figures show: runs that diverge leave them.
LIMITS = (1e-2, 1e7)


def _frame(rows: list[Row]) -> pd.DataFrame:
    frame = pd.DataFrame(rows).astype({"iteration": int, "loss": float, "lost": float, "seconds": float})
    least = frame[frame["method"] == "optimum"].set_index("data")["loss"]
    return frame.assign(above=frame["loss"] - frame["data"].map(least))


def _runs(part: pd.DataFrame) -> pd.DataFrame:
    """Return the loss above the least, a row for each iteration, a column for each run: inf once it has diverged."""
    return part.pivot_table(index="iteration", columns="seed", values="above").ffill()


def draw(frame: pd.DataFrame, name: str, out: Path) -> None:
    """Draw the loss above the least against iterations: median over runs, and all of them."""
    setting, chosen = SETTINGS[name], frame[frame["data"] == name]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True)
    for line, rows in zip(axes, ("all", f"{BATCH:,}"), strict=True):
        for axis, (method, step_sizes) in zip(line, setting.step_sizes.items(), strict=True):
            for estimator, style in STYLES.items():
                for step_size, colour in zip(step_sizes, COLOURS, strict=False):
                    kind = (chosen["rows"] == rows) & (chosen["method"] == method) & (chosen["iteration"] > 0)
                    kind &= (chosen["estimator"] == estimator) & (chosen["step_size"] == f"{step_size:g}")
                    runs = _runs(chosen[kind])
                    axis.plot(runs.median(axis=1), style, color=colour, label=f"{step_size:g}, {NAMES[estimator]}")
                    low, high = runs.min(axis=1), runs.max(axis=1).clip(upper=10.0 * LIMITS[1])
                    axis.fill_between(runs.index, low, high, alpha=0.2, color=colour, linewidth=0)
            axis.set(xscale="log", yscale="log", ylim=LIMITS, title=f"{method}, {rows} rows", xlabel="iterations")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7, ncols=2)
        line[0].set_ylabel("loss above the least, nats")
    figure.suptitle(setting.label)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def tables(frame: pd.DataFrame, rows: list[Row]) -> str:
    """Return the optimum, and the loss by iteration of every method."""
    lines = measured_on(rows)
    for name, setting in SETTINGS.items():
        chosen = frame[frame["data"] == name]
        if not len(chosen):
            continue
        one = {method: chosen[chosen["method"] == method].iloc[0] for method in ("optimum", "default")}
        start = chosen.loc[(chosen["iteration"] == 0) & (chosen["method"] == "NGD"), "loss"].iloc[0]
        lines += [f"### {setting.label}", "", f"The least loss is {one['optimum']['loss']:,.3f} nats, that of the "]
        lines[-1] += f"start {start:,.0f}. The package's default is {max(one['default']['above'], 0.0):.1g} nats above "
        lines[-1] += f"the least after {one['default']['iteration']} iterations, {one['default']['seconds']:.1f} "
        lines[-1] += "processor seconds with all that is compiled. Nats above the least:"
        columns = [t for t in (1, 10, 100) if t < setting.n_steps] + [setting.n_steps]
        kept = [min(recorded(setting.n_steps, setting.n_kept), key=lambda k, t=t: abs(k - t)) for t in columns]
        header = ["rows", "method", "gradients", "step size", *(f"T = {t:,}" for t in kept)]
        body = [_line(kept, *part) for part in chosen[chosen["step_size"] != ""].groupby(list(KEYS[1:5]), sort=False)]
        lines += ["", *table([*header, "steps lost", "seconds a run"], body), ""]
    return "\n".join(lines)


def _line(kept: list[int], key: tuple[str, ...], part: pd.DataFrame) -> list[str]:
    rows, method, estimator, step_size = key
    middle = _runs(part).median(axis=1)
    cells = [f"{middle[t]:.3g}" if np.isfinite(middle.get(t, np.inf)) else "diverged" for t in kept]
    ends = part.loc[part.groupby("seed")["iteration"].idxmax()]
    lost = "" if method == "SGD" else f"{ends['lost'].sum() / ends['iteration'].sum():.0%}"
    return [rows, method, NAMES[estimator], step_size, *cells, lost, f"{ends['seconds'].median():.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, draw the figures and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv and tables")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    file = options.out / "wu_gardner_figure2.csv"
    for name in options.sets:
        design = DESIGNS[name](options.data)
        Runs(name, Logistic(name, design.x, design.y, design.prior_sd), file).missing()
    rows = Records(file, FIELDS).read()
    frame = _frame(rows)
    write_between_marks(options.out / "wu_gardner_figures.md", tables(frame, rows), Path(__file__).name)
    for name in frame["data"].unique():
        draw(frame, name, options.figures / f"wu_gardner_figure2_{name}.png")


if __name__ == "__main__":
    main()
