"""Accuracy of this package over many seeds: ELBO, moments, evaluations, and the reported gap.

All seeds of a data set run in one process, a process per data set. A run can be stopped and
resumed: seeds that are in the results file already are not run again. From a checkout that is not
installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python accuracy.py --data DATA --references REFERENCES --out accuracy.csv --table accuracy.md
    python accuracy.py ... --models heart --seeds 3
"""

import argparse
import datetime
import subprocess
import sys
import time

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import measure
import numpy as np
import pymc as pm

from environment import describe_environment
from measure import Array, Estimate
from pymc.variational import Approximation
from records import Records, Row
from rivals import OURS, check_installed

MODELS = ("heart", "german", "icu", "epilepsy")
ELBO_DRAWS = 20_000
GAP_DRAWS = 200_000
CHUNK = 20_000
FRESH_SEED = 100_000  # of the draws that the ELBO of each run is estimated on
COMMON_SEED = 500_000  # of the base normals that a run and the long run share
LONG_RUN = {"tol": 1e-3, "max_draws": 8192, "random_seed": 12345}

SMALL_GAP = 0.02  # nats; below it a gap need not be right
GAP_FACTOR = 3.0
ELBO_SLACK = 0.05  # nats that a single seed may be below the ELBO asked for
MOST_GRADIENTS = 1_600
MOST_HESSIANS = 1_200
SHARE_CONVERGED = 1.0
SHARE_GAP_RIGHT = 0.9

FIELDS = (
    "run_id",
    "model",
    "seed",
    "elbo",
    "elbo_se",
    "em",
    "es",
    "worst_name",
    "worst_error",
    "n_gradients",
    "n_hessians",
    "n_iterations",
    "seconds",
    "compile_seconds",
    "run_seconds",
    "converged",
    "status",
    "reported_elbo",
    "reported_gap",
    "true_gap",
    "true_gap_se",
    "gap_right",
    "common_elbo",
    "common_elbo_se",
    "long_elbo",
    "long_elbo_se",
    "date",
    "environment",
)


@dataclass(frozen=True)
class Asked:
    """What is asked for on one data set; None where nothing is."""

    elbo: float | None = None
    em: float | None = None
    es: float | None = None


ASKED = {
    "german": Asked(elbo=-625.62, em=0.04, es=0.04),
    "heart": Asked(elbo=-144.04, em=0.04, es=0.04),
    "icu": Asked(elbo=-115.36),
    "epilepsy": Asked(elbo=-685.70, em=0.05, es=0.08),
}

CAPTION = f"""\
ELBO on {ELBO_DRAWS:,} fresh draws. em is the root mean square over unconstrained coordinates of the
error of the mean in reference standard deviations, es that of the relative error of the standard
deviation, both from the exact moments of the approximation. The true gap is the ELBO of a long run
(`tol={LONG_RUN["tol"]:g}, max_draws={LONG_RUN["max_draws"]}`) less that of the run, on the same
base normals ({GAP_DRAWS:,} draws unless asked otherwise); the ELBO on these is shown, too. A
reported gap is right if it is within a factor {GAP_FACTOR:g} of the true one, or if both are below
{SMALL_GAP:g} nats. "Seeds" counts the seeds that satisfy what is asked. The ELBO is met if the mean
is at least the value asked for and no seed is more than {ELBO_SLACK:g} below it; the other lines if
all seeds satisfy them, or as many as said.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the seeds that are missing, a process per data set, and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    if options.worker:
        run_seeds(options.models[0], missing_seeds(records, options.models[0], options), options)
        return
    for model in options.models:
        if missing_seeds(records, model, options):
            measure.check_inputs(options.data, options.references, [model])
            check_installed([OURS])
            code = subprocess.run(_worker_command(model, options), check=False).returncode
            if code:
                print(f"{model}: stopped with exit code {code}", file=sys.stderr)
    if options.table:
        rows = [row for row in records.read() if row["run_id"] == options.run_id]
        options.table.write_text(write_table(rows, options.models))


def missing_seeds(records: Records, model: str, options: argparse.Namespace) -> list[int]:
    """Return the seeds of a data set that are not in the results yet."""
    done = {int(row["seed"]) for row in records.read() if (row["run_id"], row["model"]) == (options.run_id, model)}
    return [seed for seed in range(1, options.seeds + 1) if seed not in done]


def run_seeds(name: str, seeds: Sequence[int], options: argparse.Namespace) -> None:
    """Fit a data set with every seed and append one row for each."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    model = getattr(measure.load_models(options.references), name)(options.data)
    reference = measure.Reference.read(options.references / f"{name}.npz")
    records = Records(options.out, FIELDS)
    common = {"run_id": options.run_id, "model": name, "environment": describe_environment()}
    long_weights = None
    for seed in seeds:
        approx, seconds = fit(model, random_seed=seed)
        if long_weights is None:  # after the first fit, whose seconds include the compiling
            long_weights = log_weights(fit(model, **LONG_RUN)[0], options.gap_draws)
        row = {"seed": seed, "seconds": seconds, **assess(approx, seed, model, reference)}
        row |= assess_gap(approx, long_weights)
        row["date"] = datetime.datetime.now().isoformat(timespec="seconds")
        records.append({**common, **row})
        print(
            f"{name} seed {seed}: ELBO {row['elbo']:.3f}, em {row['em']:.3f}, es {row['es']:.3f}, "
            f"gap {row['reported_gap']:.4f} (true {row['true_gap']:.4f}), {seconds:.1f} s"
        )


def fit(model: pm.Model, **kwargs: object) -> tuple[Approximation, float]:
    """Fit a Gaussian with our method and return the approximation and the seconds of the whole call."""
    start = time.perf_counter()
    with model:
        approx = pm.fit(method="ngvi", posterior="gaussian", progressbar=False, **kwargs)
    return approx, time.perf_counter() - start


def assess(approx: Approximation, seed: int, model: pm.Model, reference: measure.Reference) -> dict[str, object]:
    """Return ELBO, errors of the moments and the run's own statements, as columns."""
    theta = approx.draw_flat(ELBO_DRAWS, random_seed=FRESH_SEED + seed)
    estimate = Estimate.of(approx.log_p(theta) - approx.log_q(theta))
    names = measure.coordinate_names(model)
    errors = reference.errors(names, approx.mean_flat, approx.sd_flat)
    return {
        "elbo": estimate.value,
        "elbo_se": estimate.se,
        **errors._asdict(),
        "n_gradients": approx.n_gradients,
        "n_hessians": approx.n_hessians,
        "n_iterations": approx.n_iterations,
        "compile_seconds": float(approx.compile_seconds),
        "run_seconds": float(approx.run_seconds),
        "converged": bool(approx.converged),
        "status": str(approx.status),
        "reported_elbo": float(approx.elbo.value),
    }


def assess_gap(approx: Approximation, long_weights: Array) -> dict[str, object]:
    """Compare the reported gap with the one to the long run, by common random numbers."""
    weights = log_weights(approx, len(long_weights))
    difference = Estimate.of(long_weights - weights)
    common_elbo, long_elbo = Estimate.of(weights), Estimate.of(long_weights)
    reported = float(approx.gap)
    return {
        "reported_gap": reported,
        "true_gap": difference.value,
        "true_gap_se": difference.se,
        "gap_right": is_gap_right(reported, difference.value),
        "common_elbo": common_elbo.value,
        "common_elbo_se": common_elbo.se,
        "long_elbo": long_elbo.value,
        "long_elbo_se": long_elbo.se,
    }


def is_gap_right(reported: float, true: float) -> bool:
    """Tell whether a reported gap is within a factor of the true one, or both are small."""
    if reported < SMALL_GAP and true < SMALL_GAP:
        return True
    return true > 0 and true / GAP_FACTOR <= reported <= true * GAP_FACTOR


def log_weights(approx: Approximation, n: int) -> Array:
    """Return log p - log q at ``n`` draws whose base normals are the same for all fits of a model.

    The draws are made in chunks, each with its own seed, to bound the memory.
    """
    weights = []
    for start in range(0, n, CHUNK):
        theta = approx.draw_flat(min(CHUNK, n - start), random_seed=COMMON_SEED + start)
        weights.append(approx.log_p(theta) - approx.log_q(theta))
    return np.concatenate(weights)


def write_table(rows: Sequence[Row], models: Sequence[str]) -> str:
    """Return the summary over seeds as Markdown, one table per data set."""
    if not rows:
        return "No results.\n"
    environments = sorted({row["environment"] for row in rows})
    dates = sorted(row["date"][:10] for row in rows)
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = ["# Accuracy over seeds", "", f"Measured {period} on:", ""]
    lines += [f"- {environment}" for environment in environments]
    lines += ["", CAPTION]
    for model in models:
        of_model = [row for row in rows if row["model"] == model]
        if of_model:
            lines += [*_model_table(model, of_model), ""]
    return "\n".join(lines)


def _model_table(model: str, rows: Sequence[Row]) -> list[str]:
    asked = ASKED.get(model, Asked())
    column = _columns_of(rows)
    true_se = np.max(column("true_gap_se"))
    worst = max(rows, key=lambda row: abs(float(row["worst_error"])))
    return [
        f"## {model}, {len(rows)} seeds",
        "",
        "| quantity | asked | mean | min | max | seeds | met |",
        "|---|---|---|---|---|---|---|",
        _elbo_line(column("elbo"), asked.elbo),
        _line_at_most("ELBO, common normals", column("common_elbo"), None, ".3f"),
        _line_at_most("em", column("em"), asked.em, ".4f"),
        _line_at_most("es", column("es"), asked.es, ".4f"),
        _line_at_most("gradients", column("n_gradients"), MOST_GRADIENTS, ",.0f"),
        _line_at_most("Hessians", column("n_hessians"), MOST_HESSIANS, ",.0f"),
        _line_at_most("iterations", column("n_iterations"), None, ".1f"),
        _line_at_most("seconds", column("seconds"), None, ".2f"),
        _line_at_most("reported gap, nats", column("reported_gap"), None, ".4f"),
        _line_at_most(f"true gap, nats (se <= {true_se:.4f})", column("true_gap"), None, ".4f"),
        _share_line("gap right", [row["gap_right"] == "True" for row in rows], SHARE_GAP_RIGHT),
        _share_line("converged", [row["converged"] == "True" for row in rows], SHARE_CONVERGED),
        "",
        f"Long run: ELBO {float(rows[0]['long_elbo']):.3f} ± {float(rows[0]['long_elbo_se']):.3f}. "
        f"Largest standard error of an ELBO: {np.max(column('elbo_se')):.4f}. Worst coordinate: "
        f"`{worst['worst_name']}`, {float(worst['worst_error']):+.3f} sd (seed {worst['seed']}). "
        f"Statuses: {', '.join(sorted({row['status'] for row in rows}))}.",
    ]


def _columns_of(rows: Sequence[Row]) -> Callable[[str], Array]:
    return lambda name: np.array([float(row[name]) for row in rows])


def _elbo_line(values: Array, asked: float | None) -> str:
    if asked is None:
        return _table_line("ELBO", "-", values, ".3f", "-", None)
    enough = values >= asked - ELBO_SLACK
    met = bool(values.mean() >= asked and enough.all())
    return _table_line("ELBO", f">= {asked:.2f}, each - {ELBO_SLACK:g}", values, ".3f", _count(enough), met)


def _line_at_most(name: str, values: Array, asked: float | None, form: str) -> str:
    if asked is None:
        return _table_line(name, "-", values, form, "-", None)
    enough = values <= asked
    return _table_line(name, f"<= {asked:,g}", values, form, _count(enough), bool(enough.all()))


def _share_line(name: str, fulfilled: Sequence[bool], share: float) -> str:
    needed = int(np.ceil(share * len(fulfilled) - 1e-9))
    met = "yes" if sum(fulfilled) >= needed else "**no**"
    asked = f">= {needed} of {len(fulfilled)}"
    return f"| {name} | {asked} | | | | {_count(fulfilled)} | {met} |"


def _table_line(name: str, asked: str, values: Array, form: str, seeds: str, met: bool | None) -> str:
    numbers = [format(float(x), form) for x in (values.mean(), values.min(), values.max())]
    verdict = {None: "-", True: "yes", False: "**no**"}[met]
    return "| " + " | ".join([name, asked, *numbers, seeds, verdict]) + " |"


def _count(fulfilled: Sequence[bool]) -> str:
    return f"{int(np.sum(fulfilled))} of {len(fulfilled)}"


def _worker_command(model: str, options: argparse.Namespace) -> list[str]:
    """Return the command that runs one data set in a process of its own."""
    command = [sys.executable, __file__, "--worker", "--models", model]
    command += ["--data", str(options.data), "--references", str(options.references)]
    command += ["--seeds", str(options.seeds), "--gap-draws", str(options.gap_draws)]
    return [*command, "--run-id", options.run_id, "--out", str(options.out)]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", type=int, default=20, help="run the seeds 1 to this")
    parser.add_argument("--gap-draws", type=int, default=GAP_DRAWS, help="for the true gap")
    parser.add_argument("--run-id", default="1", help="name of a set of results within the file")
    parser.add_argument("--out", type=Path, default=Path("accuracy.csv"))
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
