"""Each option word alone: what `pm.fit(method="ngvi", update="sqrt")` and its like give, with nothing else chosen.

A run can be resumed: combinations of word and seed that are in the results file already are not run again.

Examples
--------
::

    python alone.py --data DATA --references REFERENCES --out alone.csv --table alone.md
"""

import argparse
import time
import warnings

from collections.abc import Sequence
from pathlib import Path

import measure
import numpy as np
import pymc as pm

from environment import describe_environment
from records import Records, Row

MODELS = ("german",)
SEEDS = 5
#: Root-mean-square errors of means and standard deviations that are asked of each update alone.
MOST_ERROR = 0.1
FIELDS = (
    "model",
    "axis",
    "word",
    "seed",
    "chosen",
    "status",
    "em",
    "es",
    "elbo",
    "gap",
    "n_iterations",
    "n_gradients",
    "n_hessians",
    "seconds",
    "environment",
)

CAPTION = f"""\
Medians over seeds, and in brackets the worst. em is the root mean square over coordinates of the error of the mean in
NUTS standard deviations, es that of the relative error of the standard deviation. Seconds are those of the whole call,
warm. Required of each update: em and es of at most {MOST_ERROR}. A diagonal or block-diagonal family leaves
correlations out: its standard deviations are too small by construction.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    measure.check_inputs(options.data, options.references, options.models)
    for model in options.models:
        run_model(model, records, options)
    if options.table:
        options.table.write_text(write_table(records.read()))


def words() -> list[tuple[str, str]]:
    """Return every axis with every one of its entries."""
    from pymc_ngvi.fitting.options import AXES

    return [(axis, word) for axis in ("update", "estimator", "step", "family") for word in AXES[axis]]


def run_model(name: str, records: Records, options: argparse.Namespace) -> None:
    """Fit one data set with each word and seed that is missing."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    model = getattr(measure.load_models(options.references), name)(options.data)
    reference = measure.Reference.read(options.references / f"{name}.npz")
    done = {(row["model"], row["axis"], row["word"], int(row["seed"])) for row in records.read()}
    for axis, word in words():
        for seed in range(1, options.seeds + 1):
            if (name, axis, word, seed) in done:
                continue
            start = time.perf_counter()
            with model, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the status is in the row
                approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **{axis: word})
            seconds = time.perf_counter() - start
            names = [approx.layout.label(i) for i in range(approx.layout.n_dim)]
            errors = reference.errors(names, approx.mean_flat, approx.sd_flat)
            record = approx.record
            records.append(
                {
                    "model": name,
                    "axis": axis,
                    "word": word,
                    "seed": seed,
                    "chosen": f"{record.family}, {record.update}, {record.estimator}, {record.step}",
                    "status": str(record.status),
                    "em": errors.em,
                    "es": errors.es,
                    "elbo": record.elbo.value,
                    "gap": record.gap,
                    "n_iterations": record.n_iterations,
                    "n_gradients": record.n_gradients,
                    "n_hessians": record.n_hessians,
                    "seconds": seconds,
                    "environment": describe_environment(),
                }
            )


def write_table(rows: Sequence[Row]) -> str:
    """Return the medians over seeds as Markdown."""
    lines = ["# One option alone", "", CAPTION]
    for environment in sorted({row["environment"] for row in rows}):
        lines.append(f"- {environment}")
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"## {model}", ""]
        lines.append(
            "| option | family, update, estimator, step | em | es | ELBO | iterations | gradients | Hessians | s |"
        )
        lines[-1] += " statuses |"
        lines.append("|---|---|---|---|---|---|---|---|---|---|")
        for axis, word in dict.fromkeys((row["axis"], row["word"]) for row in rows if row["model"] == model):
            lines.append(_line([r for r in rows if (r["model"], r["axis"], r["word"]) == (model, axis, word)]))
    return "\n".join(lines) + "\n"


def _line(rows: Sequence[Row]) -> str:
    def column(name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in rows])

    def with_worst(name: str) -> str:
        return f"{np.median(column(name)):.3f} ({column(name).max():.3f})"

    first = rows[0]
    counts = " | ".join(f"{np.median(column(name)):,.0f}" for name in ("n_iterations", "n_gradients", "n_hessians"))
    statuses = ", ".join(
        f"{sum(row['status'] == status for row in rows)} {status}" for status in sorted({row["status"] for row in rows})
    )
    return (
        f'| `{first["axis"]}="{first["word"]}"` | {first["chosen"]} | {with_worst("em")} | {with_worst("es")} '
        f"| {np.median(column('elbo')):.2f} | {counts} | {np.median(column('seconds')):.1f} | {statuses} |"
    )


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="run the seeds 1 to this")
    parser.add_argument("--out", type=Path, default=Path("alone.csv"))
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
