"""How much the proximal method and gradient descent depend on their step size, as in Khan et al. (2016).

A logistic regression, the best Gaussian of which is known to rounding. Counted are the data points that each method
reads, in passes through the data, until it is within a distance of the optimum. Runs that are in the results file
already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146

Examples
--------
::

    python khan.py
"""

import argparse

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from iterations import iterates
from logistic_regression import Logistic, breast_cancer
from records import FIGURES, RESULTS, Records, Row

from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullPrecisionState, FullState
from pymc_ngvi.methods import DIRECTIONS, STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS, Estimator

mpl.use("Agg")
import matplotlib.pyplot as plt

#: Nats above the least loss at which a run has arrived: the first counts, both are kept.
DISTANCES = (1.0, 0.1)
#: Nats above the loss of the start beyond which a run has diverged.
DIVERGED = 1e6
BATCH = 20

FIELDS = ("method", "step_size", "seed", "distance", "passes", "iterations", "end")


@dataclass(frozen=True)
class Method:
    """One line of the figure.

    Parameters
    ----------
    label, colour, marker : str
    step, update : str
        Rows of the registries.
    n_draws : int or None
        With Hessians in each iteration; None: expectations without noise.
    batch : int or None
        Data points in each iteration; None: all.
    precision : bool
        Whether the Cholesky factor is of the precision.
    most_passes : int
        Passes through the data after which a run is given up.
    step_sizes : tuple of float
    """

    label: str
    colour: str
    marker: str
    step: str
    update: str
    n_draws: int | None
    batch: int | None
    precision: bool
    most_passes: int
    step_sizes: tuple[float, ...]


def _grid(low: int, high: int, per_decade: int) -> tuple[float, ...]:
    """Return powers of 10 and what lies between them."""
    return tuple(float(f"{x:.3g}") for x in np.logspace(low, high, (high - low) * per_decade + 1))


METHODS = {
    "gd": Method("GD, factor of covariance", "C3", "o", "sgd", "euclidean", None, None, False, 1_000, _grid(-5, 0, 3)),
    "gd precision": Method(
        "GD, factor of precision", "C1", "s", "sgd", "euclidean", None, None, True, 1_000, _grid(-5, 0, 3)
    ),
    "pg": Method("PG, no noise", "C0", "o", "proximal", "natural", None, None, False, 1_000, _grid(-3, 4, 2)),
    "pg mc": Method("PG, 10 draws", "C9", "s", "proximal", "natural", 10, None, False, 300, _grid(-3, 4, 2)),
    "pg svi": Method(
        f"PG, 4 draws, batch of {BATCH}", "C2", "^", "proximal", "natural", 4, BATCH, False, 60, _grid(-3, 1, 2)
    ),
}
#: Of the methods with noise.
SEEDS = 3


def run(
    method: Method, data: Logistic, density: LogDensity, step_size: float, seed: int
) -> Iterator[tuple[float, ...]]:
    """Yield distance, passes, iterations and how the run ended; passes are inf where it did not arrive."""
    rule = STEPS[method.step](
        density,
        UPDATES[method.update],
        Estimator(lambda target, q, *rest, **options: data.moments(q))
        if method.n_draws is None
        else ESTIMATORS["price"],
        direction=DIRECTIONS.get(method.update),
        seed=seed,
        n_draws=method.n_draws or 2,
        base_draws="antithetic",
        step_size=step_size,
    )
    family = FullPrecisionState if method.precision else FullState
    start = family.from_scale(np.zeros(data.n_dim), np.ones(data.n_dim))
    in_pass = len(data.y) / (method.batch or len(data.y))
    left, end = list(DISTANCES), "not arrived"
    with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges
        for t, state in iterates(rule, start, int(method.most_passes * in_pass)):
            # The loss of a run on small batches changes little in one iteration: a tenth of a pass will do.
            if t % max(1, int(in_pass / 10)):
                continue
            above = data.loss(state.q) - data.least_loss()
            while left and above <= left[0]:
                yield left.pop(0), t / in_pass, t, "arrived"
            if not left:
                return
            if not above < DIVERGED or state.n_failed > 50:
                end = "diverged"
                break
    for distance in left:
        yield distance, np.inf, t, end


def run_missing(data: Logistic, records: Records) -> None:
    """Run every method with every step size."""
    densities = {batch: LogDensity(data.model(batch)) for batch in (None, BATCH)}
    done = {(row["method"], float(row["step_size"]), int(row["seed"])) for row in records.read()}
    for name, method in METHODS.items():
        for step_size in method.step_sizes:
            for seed in range(1, 1 + (SEEDS if method.n_draws else 1)):
                if (name, step_size, seed) in done:
                    continue
                results = list(run(method, data, densities[method.batch], step_size, seed))
                for distance, passes, iterations, end in results:
                    values = (name, step_size, seed, distance, passes, iterations, end)
                    records.append(dict(zip(FIELDS, values, strict=True)))
                print(name, step_size, seed, results)


def _table(rows: list[Row]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    for name in ("step_size", "distance", "passes"):
        table[name] = table[name].astype(float)
    return table


def _medians(table: pd.DataFrame, name: str, distance: float) -> Any:
    """Return the median passes over seeds by step size; inf where half of the runs did not arrive."""
    part = table[(table["method"] == name) & (table["distance"] == distance)]
    return part.groupby("step_size")["passes"].median()


def draw(table: pd.DataFrame, out: Path) -> None:
    """Draw passes against the step size, a panel for each distance."""
    figure, axes = plt.subplots(1, len(DISTANCES), figsize=(10, 4.8), sharey=True)
    above = 1.6 * max(method.most_passes for method in METHODS.values())
    for axis, distance in zip(axes, DISTANCES, strict=True):
        for i, (name, method) in enumerate(METHODS.items()):
            passes = _medians(table, name, distance)
            arrived = np.isfinite(passes)
            style = {"color": method.colour, "marker": method.marker, "markersize": 4}
            axis.plot(passes.index[arrived], passes[arrived], label=method.label, **style)
            # One height for each method, so that none hides another.
            never = np.full((~arrived).sum(), above * 1.25**i)
            axis.plot(passes.index[~arrived], never, linestyle="", fillstyle="none", **style)
        axis.axhline(0.8 * above, color="k", linewidth=0.6)
        axis.set(xscale="log", yscale="log", xlabel="step size of GD, beta of PG", title=f"within {distance:g} nat")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("passes through the data\n(above the line: did not arrive)")
    axes[1].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def write_table(table: pd.DataFrame) -> str:
    """Return, for each method, the least passes and the range of step sizes within a factor of them."""
    lines = [
        "| method | within, nat | fewest passes | at step size | step sizes that arrive "
        "| step sizes within 3 times the fewest |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        for distance in DISTANCES:
            passes = _medians(table, name, distance)
            arrived = passes[np.isfinite(passes)]
            if not len(arrived):
                lines.append(f"| {method.label} | {distance:g} | - | - | none | none |")
                continue
            best = arrived.idxmin()
            near = arrived[arrived <= 3 * arrived[best]].index
            lines.append(
                f"| {method.label} | {distance:g} | {arrived[best]:.3g} | {best:g} "
                f"| {arrived.index[0]:g} - {arrived.index[-1]:g} | {near[0]:g} - {near[-1]:g} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.out / "khan.csv", FIELDS)
    run_missing(breast_cancer(), records)
    table = _table(records.read())
    draw(table, options.figures / "khan.png")
    print(write_table(table))


if __name__ == "__main__":
    main()
