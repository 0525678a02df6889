"""VOGN on Bayesian neural networks as in figure 1b of Khan & Nielsen (2018), beside Bayes by Backprop and Vadam.

A network of 64 ReLU units, written in plain PyMC, on the data and splits of the authors' public code, with its
settings. VOGN is this package; the other two are `vogn_baselines`. Runs are kept in a folder, and those that are there
are not run again; the page is made of them. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

References
----------
.. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in complex
   models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326

Examples
--------
::

    python vogn.py run --data DIR --runs DIR --iterations 6144 --seeds 10
    python vogn.py pages --runs DIR --out docs/experiments
"""

import argparse
import time

from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pymc as pm

from environment import describe_environment
from iterations import iterates
from pages import table, write_between_marks
from vogn_baselines import METHODS, N_PREDICTIVE, Network, losses, run

from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.model import LogDensity
from pymc_ngvi.steps import STEPS
from pymc_ngvi.updates import UPDATES

mpl.use("Agg")
import matplotlib.pyplot as plt

DATA = {"australian": "Australian", "breast_cancer": "Breast cancer"}
N_UNITS, BATCH, N_DRAWS, STEP_SIZE = 64, 128, 16, 1e-3
#: Test log2 losses whose first iteration is told, and iterations at which the loss is.
LEVELS, SHOWN = {"australian": (0.8, 0.7, 0.6), "breast_cancer": (0.3, 0.2, 0.15)}, (10, 100, 500, 1000, 2000, 5000)
#: What is measured: columns of `losses`.
MEASURES = ("together", "by_rows", "accuracy")

#: What the authors' results hold, in the form of the table (iterations; the end; first below; no accuracy, no time).
STORED = {
    "VOGN, authors": ["1.44", ".704", ".602", ".576", ".565", ".557", "-", "51", "80", "158", "-", "-"],
    "Bayes by Backprop, authors": [
        "3.57",
        "3.90",
        "2.00",
        "1.31",
        ".862",
        ".639",
        "-",
        "2,192",
        "3,312",
        "5,834",
        "-",
        "-",
    ],
    "Vadam, authors": ["2.47", "1.44", ".847", ".842", ".666", ".687", "-", "416", "1,039", "never", "-", "-"],
}

Array = np.ndarray[Any, np.dtype[np.float64]]


def load(folder: Path, name: str) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return features and labels of the training rows, and of the test rows."""
    frame = pd.read_csv(folder / f"{name}_scale_presplit.csv")
    x, y, is_test = frame.drop(columns=["y", "is_test"]).to_numpy(float), frame["y"].to_numpy(float), frame["is_test"]
    train, test = is_test.to_numpy() == 0, is_test.to_numpy() == 1
    return (x[train], y[train]), (x[test], y[test])


def network(x: Array, y: Array) -> pm.Model:
    """Return the model; its variables are in the order of `Network`."""
    rows, labels = pm.Minibatch(x, y, batch_size=BATCH)
    with pm.Model() as model:
        w1, b1 = pm.Normal("w1", 0, 1, shape=(x.shape[1], N_UNITS)), pm.Normal("b1", 0, 1, shape=N_UNITS)
        w2, b2 = pm.Normal("w2", 0, 1, shape=N_UNITS), pm.Normal("b2", 0, 1)
        hidden = pm.math.maximum(pm.math.dot(rows, w1) + b1, 0.0)
        pm.Bernoulli("y", logit_p=pm.math.dot(hidden, w2) + b2, observed=labels, total_size=len(y))
    return model


def vogn(density: LogDensity, test: tuple[Array, Array], seed: int, n: int, evaluated: Collection[int]) -> Array:
    """Return `losses` of the test data at the iterations that are evaluated, (n, 3)."""
    rng, layers = np.random.default_rng(seed), Network(test[0].shape[1], N_UNITS)
    rule = STEPS["constant"](
        density, UPDATES["natural"], ESTIMATORS["gauss_newton"], seed=seed, n_draws=N_DRAWS, step_size=STEP_SIZE,
        base_draws="plain", stl=False,
    )  # fmt: skip
    start = DiagonalState.from_scale(layers.start(rng), np.ones(layers.n_dim))
    found = []
    for t, state in iterates(rule, start, n):
        if t in evaluated:
            draws = state.q.draws(rng.standard_normal((N_PREDICTIVE, layers.n_dim)))
            found.append(losses(layers.logits(draws, test[0])[0], test[1]))
    return np.array(found)


def evaluations(n: int) -> list[int]:
    """Return the iterations at which test data are looked at: each of the first 300, then every 20th, and the last."""
    return sorted({*range(1, min(n, 300) + 1), *range(20, n + 1, 20), n})


def measure(folder: Path, runs: Path, n: int, n_seeds: int) -> None:
    """Run what is not there yet."""
    at = evaluations(n)
    for name in DATA:
        train, test = load(folder, name)
        density = None
        for method in ("VOGN", *METHODS):
            for seed in range(n_seeds):
                path = runs / f"{name}-{method.replace(' ', '_')}-{seed}.npz"
                if path.exists():
                    continue
                began = time.process_time()
                if method == "VOGN":
                    density = density or LogDensity(network(*train))
                    out = vogn(density, test, seed, n, set(at))
                else:
                    out = run(method, train, test, seed, n_iterations=n, evaluated=set(at))
                seconds = time.process_time() - began
                np.savez(path, at=at, losses=out, seconds=seconds)
                print(name, method, seed, f"{seconds:.1f} s", flush=True)


# --- pages ------------------------------------------------------------------------------------------------------------


def medians(runs: Path) -> pd.DataFrame:
    """Return the median over seeds of each measure, by data, method and iteration."""
    parts = []
    for name in DATA:
        for method in ("VOGN", *METHODS):
            files = sorted(runs.glob(f"{name}-{method.replace(' ', '_')}-*.npz"))
            if not files:
                continue
            found = [np.load(file) for file in files]
            middle = np.median([f["losses"] for f in found], axis=0)
            part = pd.DataFrame(middle, columns=["by_rows", "together", "accuracy"])
            seconds = float(np.median([f["seconds"] for f in found]))
            parts.append(
                part.assign(data=name, method=method, iteration=found[0]["at"], seconds=seconds, n_seeds=len(files))
            )
    return pd.concat(parts, ignore_index=True)


def first_below(part: pd.DataFrame, measure: str, level: float) -> str:
    """Return the first iteration whose median loss is at most a level."""
    below = part.loc[part[measure] <= level, "iteration"]
    return f"{below.iloc[0]:,}" if len(below) else "never"


def losses_by_iteration(frame: pd.DataFrame, name: str, measure: str) -> list[str]:
    """Return the lines of a table: the median loss by iteration, and the first iterations below some levels."""
    part, levels = frame[frame["data"] == name], LEVELS[name]
    shown = [t for t in SHOWN if all(t in set(its["iteration"]) for _, its in part.groupby("method"))]
    head = ["method", *(f"{t:,}" for t in shown), "end", *(f"below {level:g}" for level in levels), "accuracy", "s"]
    lines = []
    for method, its in part.groupby("method", sort=False):
        values, last = its.set_index("iteration")[measure], its.iloc[-1]
        cells = [*(f"{values[t]:.3f}" for t in shown), f"{last[measure]:.3f} ({last['iteration']:,})"]
        cells += [first_below(its, measure, level) for level in levels]
        lines.append([method, *cells, f"{last['accuracy']:.3f}", f"{last['seconds']:.0f}"])
    if name == "australian" and measure == "together":
        lines += [[method, *row] for method, row in STORED.items()]
    return table(head, lines)


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Draw the median losses by iteration."""
    _, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharex=True)
    for column, (name, label) in enumerate(DATA.items()):
        for row, what in enumerate(MEASURES[:2]):
            for method, part in frame[frame["data"] == name].groupby("method", sort=False):
                axes[row, column].plot(part["iteration"], part[what], label=method, linewidth=1.2)
            axes[row, column].set(xscale="log", yscale="log", title=label if row == 0 else "")
    axes[0, 0].set_ylabel("test log2 loss, all rows together")
    axes[1, 0].set_ylabel("test log2 loss, row by row")
    for axis in axes[1]:
        axis.set_xlabel("iteration")
    axes[0, 0].legend()
    plt.tight_layout()
    plt.savefig(path, dpi=110)


def pages(runs: Path, out: Path) -> None:
    """Write the medians, the figure and the tables of the page."""
    frame = medians(runs)
    last = frame.groupby(["data", "method"])["iteration"].transform("max")
    early = np.unique(np.geomspace(1, 300, 40).round()).astype(int)
    kept = frame["iteration"].isin([*early, *SHOWN]) | (frame["iteration"] % 100 == 0) | (frame["iteration"] == last)
    columns = ["data", "method", "iteration", "together", "by_rows", "accuracy", "seconds", "n_seeds"]
    frame.loc[kept, columns].to_csv(out / "vogn.csv", index=False, float_format="%.5g")
    figure(frame, out / "vogn.png")
    lines = [f"Measured on: {describe_environment()}, one thread. Medians of {frame['n_seeds'].min()} seeds.", ""]
    for name, label in DATA.items():
        for what, words in (("together", "all test rows together"), ("by_rows", "row by row")):
            lines += [f"**{label}**, test log2 loss, {words}:", "", *losses_by_iteration(frame, name, what), ""]
    write_between_marks(out / "vogn.md", "\n".join(lines), "vogn.py")


def main() -> None:
    """Run, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "pages"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--iterations", type=int, default=6144)
    parser.add_argument("--seeds", type=int, default=10)
    chosen = parser.parse_args()
    if chosen.what == "run":
        measure(chosen.data, chosen.runs, chosen.iterations, chosen.seeds)
    else:
        pages(chosen.runs, chosen.out)


if __name__ == "__main__":
    main()
