"""VOGN on Bayesian neural networks as in figure 1b of Khan & Nielsen (2018), beside IVON, Bayes by Backprop and Vadam.

A network of 64 ReLU units, written in plain PyMC, on the data and splits of the authors' public code, with its
settings. VOGN and IVON are this package; the other two are `vogn_baselines`. Runs are kept in a folder, and those that
are there are not run again; the page is made of them. From a checkout that is not installed, set ``PYTHONPATH`` to its
root.

References
----------
.. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in complex
   models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326

Examples
--------
::

    python vogn.py run --data DIR --runs DIR --iterations 6144 --seeds 10
    python vogn.py pages --runs DIR
"""

import argparse
import itertools
import time

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pymc as pm

from environment import describe_environment
from iterations import iterates
from pages import table, write_between_marks
from records import FIGURES, RESULTS
from vogn_baselines import METHODS, N_PREDICTIVE, Network, losses, run

from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.fitting.options import choose
from pymc_ngvi.methods import STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS

mpl.use("Agg")
import matplotlib.pyplot as plt

DATA = {"australian": "Australian", "breast_cancer": "Breast cancer"}
N_UNITS, BATCH, N_DRAWS = 64, 128, 16
#: Test log2 losses whose first iteration is told, and iterations at which the loss is.
LEVELS, SHOWN = {"australian": (0.8, 0.7, 0.6), "breast_cancer": (0.3, 0.2, 0.15)}, (10, 100, 500, 1000, 2000, 5000)
#: What is measured: columns of `losses`.
MEASURES = ("by_rows", "together", "accuracy")
#: Evaluations whose mean has to be below a level.
N_BELOW = 10
#: Methods of the package: estimator and step rule, that of the paper, with its draws, and others without rates.
RULES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "VOGN": ("gauss_newton", "constant", {"step_size": 1e-3, "base_draws": "plain", "stl": False}),
    'VOGN, step="decay"': ("gauss_newton", "decay", {}),
    'VOGN, step="ivon"': ("gauss_newton", "ivon", {}),
    "IVON": ("stein", "ivon", {}),
}

#: What the authors' results hold, of one seed, in the form of the table: means of ten evaluations.
STORED = {
    "VOGN, authors": "1.44, .704, .602, .576, .565, .557, .550, 51, 80, 158, .855, -",
    "Bayes by Backprop, authors": "3.57, 3.90, 2.00, 1.31, .862, .639, .606, 2192, 3312, 5834, .858, -",
    "Vadam, authors": "2.47, 1.44, .847, .842, .666, .687, .681, 416, 1039, never, .855, -",
}

Array = np.ndarray[Any, np.dtype[np.float64]]


def load(folder: Path, name: str) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return features and labels of the training rows, and of the test rows."""
    frame = pd.read_csv(folder / f"{name}_scale_presplit.csv")
    x, y, is_test = frame.drop(columns=["y", "is_test"]).to_numpy(float), frame["y"].to_numpy(float), frame["is_test"]
    train, test = is_test.to_numpy() == 0, is_test.to_numpy() == 1
    return (x[train], y[train]), (x[test], y[test])


def network(x: Array, y: Array, batch: int | None = BATCH) -> pm.Model:
    """Return the model; its variables are in the order of `Network`."""
    rows, labels = (x, y) if batch is None else pm.Minibatch(x, y, batch_size=batch)
    with pm.Model() as model:
        w1, b1 = pm.Normal("w1", 0, 1, shape=(x.shape[1], N_UNITS)), pm.Normal("b1", 0, 1, shape=N_UNITS)
        w2, b2 = pm.Normal("w2", 0, 1, shape=N_UNITS), pm.Normal("b2", 0, 1)
        hidden = pm.math.maximum(pm.math.dot(rows, w1) + b1, 0.0)
        pm.Bernoulli("y", logit_p=pm.math.dot(hidden, w2) + b2, observed=labels, total_size=len(y))
    return model


def vogn(
    density: LogDensity,
    test: tuple[Array, Array],
    seed: int,
    n: int,
    evaluated: Collection[int],
    method: str = "VOGN",
) -> Array:
    """Return `losses` of the test data at the iterations that are evaluated, (n, 3)."""
    rng, layers = np.random.default_rng(seed), Network(test[0].shape[1], N_UNITS)
    estimator, step, options = RULES[method]
    update = UPDATES[choose(estimator=estimator, step=step).update]
    rule = STEPS[step](density, update, ESTIMATORS[estimator], seed=seed, n_draws=N_DRAWS, **options)
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


def file_of(name: str, method: str, seed: int | str) -> str:
    """Return the name of the file of a run."""
    return f"{name}-{''.join(c if c.isalpha() else '_' for c in method)}-{seed}.npz"


def measure(folder: Path, runs: Path, n: int, n_seeds: int, methods: Collection[str]) -> None:
    """Run what is not there yet."""
    at = evaluations(n)
    for name in DATA:
        train, test = load(folder, name)
        density = LogDensity(network(*train)) if set(methods) & set(RULES) else None
        for method, seed in itertools.product(methods, range(n_seeds)):
            path = runs / file_of(name, method, seed)
            if path.exists():
                continue
            began = time.process_time()
            if density is not None and method in RULES:
                out = vogn(density, test, seed, n, set(at), method)
            else:
                out = run(method, train, test, seed, n_iterations=n, evaluated=set(at))
            seconds = time.process_time() - began
            np.savez(path, at=at, losses=out, seconds=seconds)
            print(name, method, seed, f"{seconds:.1f} s", flush=True)


# --- pages ------------------------------------------------------------------------------------------------------------


def kept(runs: Path) -> Iterator[tuple[str, str, list[Any]]]:
    """Go through the runs: data, method and what was kept of each seed."""
    for name, method in itertools.product(DATA, (*RULES, *METHODS)):
        files = sorted(runs.glob(file_of(name, method, "*")))
        if files:
            yield name, method, [np.load(file) for file in files]


def medians(runs: Path) -> pd.DataFrame:
    """Return the median over seeds of each measure, by data, method and iteration."""
    parts = []
    for name, method, found in kept(runs):
        part = pd.DataFrame(np.median([f["losses"] for f in found], axis=0), columns=list(MEASURES))
        seconds = float(np.median([f["seconds"] for f in found]))
        part = part.assign(data=name, method=method, iteration=found[0]["at"], seconds=seconds, n_seeds=len(found))
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def first_below(found: Sequence[Any], measure: str, level: float) -> str:
    """Return the first of ten evaluations whose mean loss is at most a level: the median over seeds, and the range."""
    firsts = []
    for run_of_seed in found:
        means = np.convolve(run_of_seed["losses"][:, MEASURES.index(measure)], np.ones(N_BELOW) / N_BELOW, "valid")
        below = np.flatnonzero(means <= level)
        firsts.append(float(run_of_seed["at"][below[0]]) if len(below) else np.inf)
    least, middle, most = (
        f"{t:,.0f}" if np.isfinite(t) else "never" for t in (min(firsts), float(np.median(firsts)), max(firsts))
    )
    return f"{middle} [{least}, {most}]"


def losses_by_iteration(frame: pd.DataFrame, runs: Path, name: str, measure: str) -> list[str]:
    """Return the lines of a table: the median loss by iteration, and the first iterations below some levels."""
    levels = LEVELS[name]
    head = ["method", *(f"{t:,}" for t in SHOWN), "end", *(f"below {level:g}" for level in levels), "accuracy", "s"]
    lines = []
    for data, method, found in kept(runs):
        if data != name:
            continue
        its = frame[(frame["data"] == name) & (frame["method"] == method)]
        values, last = its.set_index("iteration")[measure], its.iloc[-1]
        cells = [f"{values[t]:.3f}" if t in values.index else "-" for t in SHOWN]
        cells += [f"{last[measure]:.3f} ({last['iteration']:,})"]
        cells += [first_below(found, measure, level) for level in levels]
        lines.append([method, *cells, f"{last['accuracy']:.3f}", f"{last['seconds']:.0f}"])
    if name == "australian" and measure == "together":
        lines += [[method, *row.split(", ")] for method, row in STORED.items()]
    return table(head, lines)


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Draw the median losses by iteration."""
    _, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharex=True)
    for column, (name, label) in enumerate(DATA.items()):
        for row, what in enumerate(("together", "by_rows")):
            for method, part in frame[frame["data"] == name].groupby("method", sort=False):
                axes[row, column].plot(part["iteration"], part[what], label=method, linewidth=1.2)
            axes[row, column].set(xscale="log", yscale="log", title=label if row == 0 else "")
    axes[0, 0].set_ylabel("test log2 loss, all rows together")
    axes[1, 0].set_ylabel("test log2 loss, row by row")
    for axis in axes[1]:
        axis.set_xlabel("iteration")
    axes[0, 1].legend(loc="upper right", fontsize="small")
    plt.tight_layout()
    plt.savefig(path, dpi=110)


def pages(runs: Path) -> None:
    """Write the medians, the figure and the tables of the page."""
    frame = medians(runs)
    last = frame.groupby(["data", "method"])["iteration"].transform("max")
    early = np.unique(np.geomspace(1, 300, 40).round()).astype(int)
    thin = frame["iteration"].isin([*early, *SHOWN]) | (frame["iteration"] % 100 == 0) | (frame["iteration"] == last)
    columns = ["data", "method", "iteration", "together", "by_rows", "accuracy", "seconds", "n_seeds"]
    frame.loc[thin, columns].to_csv(RESULTS / "vogn.csv", index=False, float_format="%.5g")
    figure(frame, FIGURES / "vogn.png")
    lines = [f"Measured on: {describe_environment()}, one thread. Medians of {frame['n_seeds'].min()} seeds.", ""]
    for name, label in DATA.items():
        for what, words in (("together", "all test rows together"), ("by_rows", "row by row")):
            lines += [f"**{label}**, test log2 loss, {words}:", "", *losses_by_iteration(frame, runs, name, what), ""]
    write_between_marks(RESULTS / "vogn.md", "\n".join(lines), "vogn.py")


def main() -> None:
    """Run, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "pages"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=6144)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=[*RULES, *METHODS], choices=[*RULES, *METHODS])
    chosen = parser.parse_args()
    if chosen.what == "run":
        measure(chosen.data, chosen.runs, chosen.iterations, chosen.seeds, chosen.methods)
    else:
        pages(chosen.runs)


if __name__ == "__main__":
    main()
