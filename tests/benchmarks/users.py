"""Models of users' kinds, fitted by the default: how each ends, how far off it is, and whether its verdict is right.

Each model is fitted, drawn from, summarised and diagnosed in a process of its own, and then fitted from other starts.
The moments of NUTS that it is compared with are in ``users_models/references.npz``; ``--references`` makes those that
are missing (with nutpie; an hour or so for all). A run can be stopped and resumed: models that are in the results file
already are not run again. The other starts take most of the time; ``--starts 1 --earlier FILE`` takes their best ELBO
from the results file of an earlier run.

Examples
--------
::

    python users.py --processes 2
    python users.py --models "groups: radon" --starts 1 --out radon.csv --table radon.md
"""

import argparse
import csv
import datetime
import os
import tempfile
import time
import traceback
import warnings

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from isolated import first_line, report, run_process, script
from measure import Reference, coordinate_names, unconstrain
from pages import column_of, measured_on, table, write_between_marks
from records import Records, Row
from users_models import (
    EXCHANGEABLE,
    IMPROPER,
    MODELS,
    OF_EITHER_SIGN,
    PARTIAL,
    SAMPLED_AS,
    SEVERAL_MODES,
    TWINS,
)
from xarray import DataTree

RESULTS = Path(__file__).parent / "results"
REFERENCES = Path(__file__).parent / "users_models" / "references.npz"
#: Errors of a mean, in standard deviations, and of a standard deviation, relative, from which on a fit is not to be
#: relied on: the limits of `approx.diagnose()`.
MEAN, SD = 0.3, 0.2
#: Nats below the best of all starts that a fit that says "converged" may be.
SLACK = 1.0
N_DRAWS, LIMIT = 2_000, 300.0
CHAINS, TUNE, DRAWS = 4, 800, 1_200

FIELDS = (
    "model", "kind", "n_dim", "status", "elbo", "gap", "em", "es", "worst_mean", "worst_mean_at", "worst_sd",
    "worst_sd_at", "exact", "reliable", "khat", "best_elbo", "below_best", "n_starts", "n_gradients", "n_hessians",
    "fit_seconds", "summary_seconds", "diagnose_seconds", "reasons", "posterior", "note", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
The default fit of models of users' kinds (`tests/benchmarks/users_models/`), one seed. em: root mean square over
unconstrained coordinates of the error of the mean in standard deviations of NUTS; es: of the relative error of the
standard deviation; worst: the largest of each. Exact: whether an exact posterior came of the Gaussian. The verdict is
that of `approx.diagnose()`: a *false assurance* is "reliable" where a mean is off by more than {MEAN:g} sd or a
standard deviation by more than {SD:.0%}, a *false alarm* "not reliable" where all are within half of that, both beyond
two standard errors of the reference. Below best: nats that the ELBO of the Gaussian is below the best of all starts.
Seconds are those of processors, for the first fit in a process, compiling included.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    if options.worker:
        measure_model(options.models[0], options.seed, options.starts)
        return
    if options.references:
        make_references(options.models, options.draws, options.processes)
        return
    records = Records(options.out, FIELDS)
    done = {row["model"] for row in records.read()}
    missing = [name for name in options.models if name not in done]
    earlier = _read_earlier(options.earlier)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        for name, row in pool.map(lambda name: (name, _in_process(name, options, Path(folder))), missing):
            records.append(row | _best_of(row, earlier.get(name, {})))
            print(f"{name}: {row['status']} {row.get('note', '')}", flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def _read_earlier(file: Path | None) -> dict[str, Row]:
    if file is None:
        return {}
    with file.open(newline="") as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


def _best_of(row: dict[str, object], earlier: Row) -> dict[str, object]:
    """Return the columns about the best ELBO, where an earlier run had other starts."""
    if not earlier.get("best_elbo") or row.get("elbo") is None:
        return {}
    elbo = float(str(row["elbo"]))
    best = max(float(earlier["best_elbo"]), float(str(row.get("best_elbo", elbo))))
    return {"best_elbo": best, "below_best": best - elbo, "n_starts": earlier["n_starts"]}


def _in_process(name: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    command = script(__file__, "--worker", "--models", name, "--seed", options.seed, "--starts", options.starts)
    found = run_process(command, folder / str(list(MODELS).index(name)), LIMIT)
    for name_of in ("process_seconds", "seconds"):
        found.pop(name_of, None)
    row = {"model": name, "kind": MODELS[name][0], "environment": describe_environment(), **found}
    return {**row, "date": datetime.datetime.now().isoformat(timespec="seconds")}


def measure_model(name: str, seed: int, n_starts: int) -> None:
    """Fit a model and print the columns of its row as they are known."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    warnings.simplefilter("ignore")  # the status is in the row
    model = MODELS[name][1]()
    stage = "fit"
    try:
        start = _processor_seconds()
        with model:
            approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False)
        seconds = _processor_seconds() - start  # reported, they keep the row if the rest takes too long
        report(seconds=seconds, fit_seconds=seconds, **_outcome(approx))
        report(**_errors(name, model, approx))
        stage = "sample"
        approx.sample(N_DRAWS, random_seed=seed)
        stage, start = "summary", _processor_seconds()
        str(approx.summary(random_seed=seed))
        report(summary_seconds=_processor_seconds() - start)
        stage, start = "diagnose", _processor_seconds()
        if name not in PARTIAL:
            diagnosis = approx.diagnose(random_seed=seed)
            report(
                diagnose_seconds=_processor_seconds() - start,
                reliable=int(diagnosis.reliable),
                khat=float(diagnosis.khat),
                reasons=" | ".join(diagnosis.reasons),
            )
        stage = "other starts"
        report(**_other_starts(name, model, approx, seed, n_starts))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        refused = stage == "fit" and isinstance(error, ValueError)
        report(status="refused" if refused else f"error in {stage}", note=f"{first_line(error)} ({where})")


def _processor_seconds() -> float:
    """Return those of this process and of its children, compilers among them, so far."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def _outcome(approx: Any) -> dict[str, object]:
    record = approx.record
    return {
        "n_dim": approx.layout.n_dim,
        "status": str(record.status),
        "elbo": float(record.elbo.value),
        "gap": None if np.isnan(record.gap) else float(record.gap),
        "n_gradients": record.n_gradients,
        "n_hessians": record.n_hessians,
        "exact": int(record.is_exact),
        "posterior": record.posterior,
    }


def _errors(name: str, model: pm.Model, approx: Any) -> dict[str, object]:
    """Return the errors of the moments."""
    reference = read_reference(name)
    if reference is None:
        return {}
    names = coordinate_names(model)
    mean, sd = approx.mean_flat, approx.sd_flat
    errors = reference.errors(names, mean, sd)
    ratio = sd / np.array([reference.sd[n] for n in names]) - 1.0
    worst = int(np.argmax(np.abs(ratio)))
    return {
        "em": errors.em,
        "es": errors.es,
        "worst_mean": errors.worst_error,
        "worst_mean_at": errors.worst_name,
        "worst_sd": float(ratio[worst]),
        "worst_sd_at": names[worst],
    }


def _other_starts(name: str, model: pm.Model, approx: Any, seed: int, n_starts: int) -> dict[str, object]:
    """Fit from draws of the prior, or from wide normals where there is none, and return the best ELBO."""
    elbos = [approx.record.elbo.value]
    rng = np.random.default_rng([seed, n_starts])
    if name in (*PARTIAL, *IMPROPER):
        return {}
    prior = approx.density.prior_draws(n_starts, seed)
    for i in range(1, n_starts):
        known = i < len(prior) and np.isfinite(prior[i]).all()
        point = prior[i] if known else rng.normal(0.0, 2.0, approx.layout.n_dim)
        try:
            with model:
                other = pm.fit(
                    300,
                    method="ngvi",
                    posterior="gaussian",
                    random_seed=seed + i,
                    start=approx.layout.unflatten(point),
                    progressbar=False,
                )
        except (ValueError, ArithmeticError):
            continue
        if np.isfinite(other.elbo.value) and other.elbo.se < SLACK:
            elbos.append(other.elbo.value)
    best = float(max(elbos))
    return {"best_elbo": best, "below_best": best - elbos[0], "n_starts": len(elbos)}


def verdict_of(row: Row) -> str:
    """Return whether the verdict of a row is right, as one word or two.

    Two standard errors of the reference's least known coordinate are in its favour.
    """
    name = row["model"]
    if name in IMPROPER and row["reliable"]:
        return "right" if row["status"] != "converged" else "false assurance"
    if not row["reliable"] or not row["worst_mean"]:
        return "-"
    [ess, _] = quality_of(name)
    se_mean, se_sd = 1.0 / np.sqrt(ess), 1.0 / np.sqrt(2.0 * ess)
    mean, sd = abs(float(row["worst_mean"])), abs(float(row["worst_sd"]))
    if row["reliable"] == "1":
        off = mean > MEAN + 2.0 * se_mean or sd > SD + 2.0 * se_sd
        return "false assurance" if off else "right"
    near = mean < 0.5 * MEAN - 2.0 * se_mean and sd < 0.5 * SD - 2.0 * se_sd
    return "false alarm" if near else "right"


def quality_of(name: str) -> tuple[float, float]:
    """Return the least effective sample size and the largest R-hat of a reference."""
    with np.load(REFERENCES) as file:
        ess, rhat = file[f"{name}/quality"].tolist()
    return ess, rhat


def read_reference(name: str) -> Reference | None:
    """Return the moments of NUTS; None where there are none."""
    if not REFERENCES.exists():
        return None
    with np.load(REFERENCES) as file:
        if f"{name}/mean" not in file:
            return None
        names = file[f"{name}/names"].tolist()
        mean, sd = (dict(zip(names, file[f"{name}/{of}"].tolist(), strict=True)) for of in ("mean", "sd"))
    if name in EXCHANGEABLE:  # chains of NUTS seldom change labels: what each has is that of one order of these
        same = [n for n in names if n.split("[")[0] == EXCHANGEABLE[name]]
        centre = np.mean([mean[n] for n in same])
        square = np.mean([mean[n] ** 2 + sd[n] ** 2 for n in same])
        mean |= dict.fromkeys(same, float(centre))
        sd |= dict.fromkeys(same, float(np.sqrt(square - centre**2)))
    mirrored = [n for n in names if n.split("[")[0] in OF_EITHER_SIGN.get(name, ())]
    sd |= {n: float(np.hypot(mean[n], sd[n])) for n in mirrored}  # squares are the same in chains of either sign
    mean |= dict.fromkeys(mirrored, 0.0)
    return Reference(mean, sd)


def make_references(names: Sequence[str], n_draws: int, cores: int) -> None:
    """Sample the models that have no reference yet, with so many draws a chain, and write the file after each."""
    import arviz_stats
    import nutpie

    for name in names:
        if name in IMPROPER or read_reference(name) is not None:
            continue
        model, start = TWINS.get(name, MODELS[name][1])(), time.perf_counter()
        build, moved = SAMPLED_AS.get(name, (None, None))
        tree = nutpie.sample(
            nutpie.compile_pymc_model(build() if build else model),
            chains=4 * CHAINS if name in SEVERAL_MODES else CHAINS,
            cores=cores, tune=TUNE, draws=n_draws, seed=1, progress_bar=False, target_accept=0.9,
        )  # fmt: skip
        posterior = tree.posterior if moved is None else DataTree(moved(tree.posterior.to_dataset()))
        theta = unconstrain(posterior, model)
        rhat = max(float(v.max()) for v in arviz_stats.rhat(posterior).data_vars.values() if v.size)
        ess = min(float(v.min()) for v in arviz_stats.ess(posterior).data_vars.values() if v.size)
        known = dict(np.load(REFERENCES)) if REFERENCES.exists() else {}
        known |= {
            f"{name}/names": np.array(coordinate_names(model)),
            f"{name}/mean": theta.mean(axis=0),
            f"{name}/sd": theta.std(axis=0, ddof=1),
            f"{name}/quality": np.array([ess, rhat]),
        }
        np.savez_compressed(REFERENCES, **known)
        print(f"{name}: ess {ess:.0f}, R-hat {rhat:.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    if not rows:
        return "No results.\n"
    rows = sorted(rows, key=lambda row: list(MODELS).index(row["model"]))
    header = (
        "model", "d", "ended", "em", "es", "worst mean", "worst sd", "exact", "reliable", "verdict", "below best",
        "fit, s", "summary, s", "diagnose, s",
    )  # fmt: skip
    cells = [_cells(row) for row in rows]
    return "\n".join([*measured_on(rows), CAPTION, *_totals(rows), "", *table(header, cells), ""])


def _totals(rows: Sequence[Row]) -> list[str]:
    of = column_of(rows)
    verdicts = [verdict_of(row) for row in rows]
    count = {word: verdicts.count(word) for word in ("right", "false alarm", "false assurance")}
    crashed = sum(row["status"].startswith(("error", "more than")) for row in rows)
    exact = sum(row["exact"] == "1" for row in rows)
    low = [row for row in rows if row["status"] == "converged" and row["below_best"]]
    n_low = sum(float(row["below_best"]) > SLACK for row in low)
    return [
        f"{len(rows)} models, {exact} of them with an exact posterior; {crashed} crashed or were killed; verdicts: "
        f"{count['right']} right, "
        f"{count['false alarm']} false alarms, {count['false assurance']} false assurances; {n_low} of {len(low)} that "
        f"say converged are more than {SLACK:g} nat below the best start. Median seconds of a fit: "
        f"{np.median(of('fit_seconds')):.1f}."
    ]


def _cells(row: Row) -> list[str]:
    def number(column: str, form: str) -> str:
        return format(float(row[column]), form) if row[column] else "-"

    reliable = {"1": "yes", "0": "no"}.get(row["reliable"], "-")
    ended = row["status"] + (f": {row['note'][:60]}" if row["status"].startswith(("refused", "error")) else "")
    return [
        row["model"],
        row["n_dim"] or "-",
        ended,
        number("em", ".3f"),
        number("es", ".3f"),
        f"{number('worst_mean', '+.2f')} `{row['worst_mean_at']}`" if row["worst_mean"] else "-",
        f"{number('worst_sd', '+.2f')} `{row['worst_sd_at']}`" if row["worst_sd"] else "-",
        {"1": "yes", "0": "no"}.get(row["exact"], "-"),
        reliable,
        verdict_of(row),
        number("below_best", ".2f"),
        number("fit_seconds", ".1f"),
        number("summary_seconds", ".1f"),
        number("diagnose_seconds", ".1f"),
    ]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--starts", type=int, default=10, help="the default one included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--earlier", type=Path, help="results of an earlier run, whose best ELBOs count too")
    parser.add_argument("--processes", type=int, default=1, help="side by side")
    parser.add_argument("--references", action="store_true", help="make the references that are missing, and stop")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each chain, for references")
    parser.add_argument("--out", type=Path, default=RESULTS / "users.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "users.md", help="page with marks, or new")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
