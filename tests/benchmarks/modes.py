"""Posteriors with several modes, fitted by the default: whether each is right, or refused with a reason that names it.

Each model is fitted, drawn from and diagnosed in a process of its own. A run can be stopped and resumed: models and
seeds that are in the results file already are not run again.

Examples
--------
::

    python modes.py
    python modes.py --cases "sinusoid 1" "y = u^2" --seeds 3 --out small.csv --table small.md
"""

import argparse
import datetime
import json
import tempfile
import time
import traceback
import warnings

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from isolated import first_line, report, run_process, script
from modes_models import CASES, Case, Moments
from pages import measured_on, table, write_between_marks
from records import Records, Row
from users_models import MODELS as USERS

RESULTS = Path(__file__).parent / "results"
REFERENCES = Path(__file__).parent / "modes_references.json"
#: Errors of a mean, in standard deviations, and of a standard deviation, relative, from which on a fit is wrong; and up
#: to which it is right without doubt.
MEAN, SD = 0.3, 0.2
RIGHT, REFUSED, WRONG, ALARM, OTHER = "right", "refused", "wrong and reliable", "false alarm", "no result"
N_DRAWS, LIMIT = 4_000, 900.0
#: Of NUTS, where nothing else is exact: chains from draws of the prior, tuning and draws of each.
CHAINS, TUNE, DRAWS = 8, 1_000, 2_000

KEY = ("case", "seed")
FIELDS = (
    *KEY, "outcome", "named", "reliable", "worst_mean", "worst_sd", "worst_at", "posterior", "restarted", "n_modes",
    "khat", "fit_seconds", "reasons", "status", "note", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
Outcomes of the default fit. *right*: `approx.diagnose()` calls it reliable, and no mean is off by more than
{MEAN:g} sd, no standard deviation by more than {SD:.0%}. *refused*: not reliable, and some moment is off, or no moments
are known; *named* where a reason names a variable in question. *false alarm*: not reliable, though all moments are
right.
Moments are exact (two Gaussians, grids), posteriordb's (Lotka-Volterra), those of chains that a program of its own
ran (SIR), or those of NUTS with as many chains ({CHAINS}) from the prior; "worst" is the largest error of a mean in
standard deviations, and of a standard deviation.
Modes: those that were found beside the one of the fit, and that no exact posterior covers. Seconds are those of
processors, for the first fit in a process, compiling included.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    if options.worker:
        measure_case(options.cases[0], options.seed)
        return
    if options.references:
        make_references(options.cases)
        return
    records = Records(options.out, FIELDS)
    done = {(row["case"], row["seed"]) for row in records.read()}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.seeds + 1):
            for name in options.cases:
                if (name, str(seed)) in done:
                    continue
                row = _in_process(name, seed, Path(folder))
                records.append(row)
                print(f"{name}, seed {seed}: {row['outcome']} {row.get('note', '')}", flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def _in_process(name: str, seed: int, folder: Path) -> dict[str, object]:
    command = script(__file__, "--worker", "--cases", name, "--seed", seed)
    found = run_process(command, folder / f"{list(CASES).index(name)}-{seed}", LIMIT)
    found.pop("process_seconds", None)
    found.pop("seconds", None)
    found.setdefault("outcome", OTHER)
    date = datetime.datetime.now().isoformat(timespec="seconds")
    return {"case": name, "seed": seed, "environment": describe_environment(), "date": date, **found}


def measure_case(name: str, seed: int) -> None:
    """Fit a model and print the columns of its row."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    warnings.simplefilter("ignore")  # the status is in the row
    case = CASES[name]
    try:
        clock = time.process_time()
        with case.build():
            approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False)
        report(
            fit_seconds=time.process_time() - clock, status=str(approx.record.status),
            posterior=approx.record.posterior, restarted=approx.record.restarted, n_modes=len(approx.record.modes),
        )  # fmt: skip
        draws = approx.sample(N_DRAWS, random_seed=seed)["posterior"]
        diagnosis = approx.diagnose()
        moments = case.moments() if case.moments is not None else references().get(name)
        errors = errors_of(draws, moments) or errors_of_users(name, approx)
        report(
            reliable=int(diagnosis.reliable), khat=float(diagnosis.khat), reasons=" / ".join(diagnosis.reasons),
            named=int(is_named(diagnosis.reasons, case.names)), **errors,
        )  # fmt: skip
        report(outcome=outcome_of(diagnosis.reliable, errors.get("worst_mean"), errors.get("worst_sd")))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        report(outcome=OTHER, note=f"{first_line(error)} ({Path(at.filename).name}:{at.lineno})")


def errors_of(draws: Any, moments: Moments | None) -> dict[str, Any]:
    """Return the largest error of a mean in standard deviations, of a standard deviation, and whose that is."""
    if moments is None:
        return {}
    means, sds, names = [], [], []
    for name, (mean, sd) in moments.items():
        values = np.concatenate(np.asarray(draws[name]))
        values = values.reshape(len(values), -1)
        means.append((values.mean(axis=0) - np.ravel(mean)) / np.ravel(sd))
        sds.append(values.std(axis=0) / np.ravel(sd) - 1.0)
        names += [name] * values.shape[1]
    mean, sd = np.concatenate(means), np.concatenate(sds)
    i, j = int(np.argmax(np.abs(mean))), int(np.argmax(np.abs(sd)))
    at = names[i] if abs(mean[i]) / MEAN > abs(sd[j]) / SD else names[j]
    return {"worst_mean": float(mean[i]), "worst_sd": float(sd[j]), "worst_at": at}


def errors_of_users(name: str, approx: Any) -> dict[str, Any]:
    """Return the same of unconstrained coordinates, where the battery of `users.py` has a reference."""
    from measure import coordinate_names
    from users import read_reference
    from users_models import SEVERAL_MODES

    reference = read_reference(name) if name in USERS and name not in SEVERAL_MODES else None
    if reference is None:
        return {}
    names, mean, sd = coordinate_names(approx.model), approx.mean_flat, approx.sd_flat
    errors = [(mean[i] - reference.mean[n]) / reference.sd[n] for i, n in enumerate(names)]
    ratios = [sd[i] / reference.sd[n] - 1.0 for i, n in enumerate(names)]
    i, j = int(np.argmax(np.abs(errors))), int(np.argmax(np.abs(ratios)))
    at = names[i] if abs(errors[i]) / MEAN > abs(ratios[j]) / SD else names[j]
    return {"worst_mean": float(errors[i]), "worst_sd": float(ratios[j]), "worst_at": at}


def outcome_of(reliable: bool, mean: float | None, sd: float | None) -> str:
    """Return the outcome in words: without known moments, a reliable one can't be judged."""
    if mean is None or sd is None:
        return OTHER if reliable else REFUSED
    is_right = abs(mean) <= MEAN and abs(sd) <= SD
    if reliable:
        return RIGHT if is_right else WRONG
    return ALARM if is_right else REFUSED


def is_named(reasons: Sequence[str], names: Sequence[str]) -> bool:
    """Tell whether a reason names one of some variables, or an entry of it, or its unconstrained value."""
    return any(f"`{name}{end}" in reason for reason in reasons for name in names for end in ("`", "[", "_"))


# --- references ---


def references() -> dict[str, Moments]:
    """Return the moments that NUTS gave."""
    if not REFERENCES.exists():
        return {}
    found = json.loads(REFERENCES.read_text())
    return {
        name: {of: (np.array(mean), np.array(sd)) for of, (mean, sd) in moments.items()}
        for name, moments in found.items()
    }


def make_references(names: Sequence[str]) -> None:
    """Sample the models whose moments are not known otherwise; of two equal modes, draws of one are those of both."""
    known = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    for name in names:
        case = CASES[name]
        if case.moments is not None or name in known or (case.sampled or case.drawn) is None:
            continue
        draws = _by_nuts(case) if case.drawn is None else case.drawn()
        if case.image is not None:
            draws = {of: np.concatenate([x, case.image(draws)[of]]) for of, x in draws.items()}
        known[name] = {of: [x.mean(axis=(0, 1)).tolist(), x.std(axis=(0, 1)).tolist()] for of, x in draws.items()}
        REFERENCES.write_text(json.dumps(known, indent=1))
        print(name, flush=True)


def _by_nuts(case: Case) -> dict[str, Any]:
    import nutpie

    posterior = nutpie.sample(
        nutpie.compile_pymc_model(case.sampled()), chains=CHAINS, cores=1, tune=TUNE, draws=DRAWS, seed=1,
        progress_bar=False, target_accept=0.95,
    ).posterior  # fmt: skip
    return {of: np.asarray(posterior[of]) for of in case.names}


# --- the page ---


def write_table(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    order = list(CASES)
    rows = sorted(rows, key=lambda row: (order.index(row["case"]), int(row["seed"])))
    counts = Counter(row["outcome"] for row in rows)
    named = sum(row["named"] == "1" for row in rows if row["outcome"] == REFUSED)
    summary = (
        f"{len(rows)} fits: {counts[RIGHT]} right, {counts[REFUSED]} refused ({named} of them named), "
        f"{counts[WRONG]} wrong and reliable, {counts[ALARM]} false alarms, {counts[OTHER]} without a result to judge."
    )
    header = (
        "model",
        "seed",
        "outcome",
        "named",
        "worst mean",
        "worst sd",
        "at",
        "modes",
        "k-hat",
        "fit, s",
        "posterior",
    )
    cells = [_cells(row) for row in rows]
    return "\n".join([*measured_on(rows), CAPTION, summary, "", *table(header, cells), ""])


def _cells(row: Row) -> list[str]:
    def number(column: str, form: str) -> str:
        return format(float(row[column]), form) if row[column] else "-"

    outcome = f"**{row['outcome']}**" if row["outcome"] in (WRONG, ALARM) else row["outcome"]
    note = (
        row["note"][:80] if row["outcome"] == OTHER and row["note"] else row["posterior"].split(" (")[0].split(":")[0]
    )
    return [
        row["case"],
        row["seed"],
        outcome,
        {"1": "yes", "0": "no"}.get(row["named"], "-") if row["outcome"] == REFUSED else "-",
        number("worst_mean", "+.2f"),
        number("worst_sd", "+.2f"),
        f"`{row['worst_at']}`" if row["worst_at"] else "-",
        row["n_modes"] or "-",
        number("khat", ".2f"),
        number("fit_seconds", ".1f"),
        note,
    ]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--references", action="store_true", help="make the references that are missing, and stop")
    parser.add_argument("--out", type=Path, default=RESULTS / "modes.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "modes.md", help="page with marks, or new")
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
