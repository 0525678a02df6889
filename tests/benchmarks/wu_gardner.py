"""Hessians against gradients alone, in the setting of Wu and Gardner (2024).

Bayesian logistic regression with the natural-parameter update and a constant step size: the loss against iterations,
and how often a step would have left no positive definite precision. The paper's own figures, with its data, are in
``wu_gardner_figure1.py`` and ``wu_gardner_figure2.py``. Runs that are in the results file already are not run again.
From a checkout that is not installed, set ``PYTHONPATH`` to its root.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870

Examples
--------
::

    python wu_gardner.py --data DATA --references REFERENCES
"""

import argparse

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import measure
import pandas as pd

from iterations import iterates, recorded
from logistic_regression import Logistic, breast_cancer, german
from records import FIGURES, RESULTS, Records, Row

from pymc_ngvi.density import LogDensity
from pymc_ngvi.methods import STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS, Moments

mpl.use("Agg")
import matplotlib.pyplot as plt

#: Step size of the natural-parameter update, and iterations.
STEP_SIZES = {0.1: 150, 0.01: 800}
METHODS = ("price", "pathwise", "stein")
#: As in the paper, and as the package has them by default.
DRAWS: dict[str, dict[str, Any]] = {
    "plain": {"base_draws": "plain", "stl": False},
    "antithetic": {"base_draws": "antithetic", "stl": True},
}
N_DRAWS = 10

FIELDS = ("data", "method", "step_size", "draws", "seed", "iteration", "value", "lost", "halved")
#: Columns that name one run.
KEYS = FIELDS[:5]


# --- runs -------------------------------------------------------------------------------------------------------------


class Counted:
    """The natural-parameter update with its correction, counting where it was needed.

    Attributes
    ----------
    n_lost : int
        Steps after which the precision would not have been positive definite.
    n_invalid : int
        Of these, steps that the correction did not save either: they are halved.
    """

    def __init__(self) -> None:
        self.n_lost = self.n_invalid = 0

    def __call__(self, state: Any, moments: Moments, step_size: float, correct: bool) -> Any:
        """Take one step."""
        plain = UPDATES["natural"](state, moments, step_size, False)
        if plain is not None:
            return plain
        self.n_lost += 1
        corrected = UPDATES["natural"](state, moments, step_size, correct)
        self.n_invalid += corrected is None
        return corrected


def run_logistic(data: Logistic, seeds: int, records: Records) -> None:
    """Run every estimator with every step size and kind of draws."""
    density = LogDensity(data.model())
    done = {tuple(row[key] for key in KEYS) for row in records.read()}
    for draws, options in DRAWS.items():
        for step_size, n in STEP_SIZES.items():
            for method in METHODS:
                for seed in range(1, 1 + (seeds if draws == "plain" else -(-seeds // 2))):
                    key = (data.name, method, f"{step_size:g}", draws, str(seed))
                    if key in done:
                        continue
                    update = Counted()
                    rule = STEPS["constant"](
                        density, update, ESTIMATORS[method], seed=seed, n_draws=N_DRAWS, step_size=step_size, **options
                    )
                    keep, rows = recorded(n), []
                    for t, state in iterates(rule, data.start(), n):
                        if t in keep:
                            loss = data.loss(state.q) - data.least_loss()
                            rows.append((t, loss, update.n_lost, update.n_invalid))
                    _append(records, key, rows)
                    print(f"{data.name}, {method}, {draws}, step {step_size:g}, seed {seed}: {rows[-1][1:]}")


def _append(records: Records, key: tuple[str, ...], rows: list[tuple[float, ...]]) -> None:
    for t, value, lost, halved in rows:
        values = {"iteration": t, "value": float(f"{value:.5g}"), "lost": lost, "halved": halved}
        records.append({**dict(zip(KEYS, key, strict=True)), **values})


# --- figures and tables -----------------------------------------------------------------------------------------------

COLOURS = {"price": "C0", "pathwise": "C3", "stein": "C1"}
#: Nats above the least loss that the figure shows: runs that diverge leave it.
SHOWN = (5e-3, 1e6)
NAMES = {"price": "Hessians (Price)", "pathwise": "reparametrisation", "stein": "Stein"}


def _table(rows: list[Row]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    for name in ("seed", "iteration", "value", "lost", "halved"):
        table[name] = pd.to_numeric(table[name])
    return table


def _band(axis: Any, table: pd.DataFrame, **style: Any) -> None:
    """Draw the median over seeds, and all but the extreme tenths."""
    groups = table.groupby("iteration")["value"]
    middle, low, high = groups.median(), groups.quantile(0.1), groups.quantile(0.9)
    axis.plot(middle.index, middle, **style)
    axis.fill_between(middle.index, low, high, alpha=0.2, color=style["color"], linewidth=0)


def draw_logistic(table: pd.DataFrame, out: Path, draws: str) -> None:
    """Draw the loss above that of the best Gaussian against iterations."""
    data = list(dict.fromkeys(table["data"]))
    figure, axes = plt.subplots(len(data), len(STEP_SIZES), figsize=(9, 6.5), squeeze=False, sharey="row")
    for line, name in zip(axes, data, strict=True):
        for axis, step_size in zip(line, STEP_SIZES, strict=True):
            chosen = table[(table["data"] == name) & (table["step_size"] == f"{step_size:g}")]
            for method in METHODS:
                part = chosen[(chosen["method"] == method) & (chosen["draws"] == draws) & (chosen["iteration"] > 0)]
                _band(axis, part, color=COLOURS[method], label=NAMES[method])
            axis.set(xscale="log", yscale="log", title=f"{name}, step size {step_size:g}", xlabel="iterations")
            axis.set_ylim(*SHOWN)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("loss above the least, nats")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def logistic_table(table: pd.DataFrame) -> str:
    """Return the loss at the end and the share of steps that were corrected, over seeds."""
    lines = [
        "| data | draws | step size | estimator | loss above the least at the end, nats: median (10 % - 90 %) "
        "| steps not positive definite | of these halved |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, part in table.groupby(["data", "draws", "step_size", "method"], sort=False):
        name, draws, step_size, method = key
        last = part[part["iteration"] == part["iteration"].max()]
        low, middle, high = last["value"].quantile([0.1, 0.5, 0.9])
        n_steps = last["iteration"].sum()
        lines.append(
            f"| {name} | {draws} | {step_size} | `{method}` | {middle:.3g} ({low:.3g} - {high:.3g}) "
            f"| {last['lost'].sum() / n_steps:.1%} | {last['halved'].sum() / n_steps:.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, draw the figure and print the table."""
    options = _parse_options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.out / "wu_gardner.csv", FIELDS)
    measure.check_inputs(options.data, options.references, ["german"])
    for data in (breast_cancer(), german(options.data)):
        print(f"{data.name}: least loss {data.least_loss():.4f}")
        run_logistic(data, options.seeds, records)
    found = _table(records.read())
    draw_logistic(found, options.figures / "wu_gardner.png", "plain")
    print(logistic_table(found))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--seeds", type=int, default=5, help="half as many where draws are antithetic")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
