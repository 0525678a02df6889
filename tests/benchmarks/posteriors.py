"""What users get by default, model by model: seconds beside rivals, the verdict, and errors of what is looked at.

Each model is fitted in a process of its own with an empty compile folder: first, and then again in the same process,
with other seeds. Draws of each fit are compared with NUTS, or with moments that are known otherwise, in coordinates and
in functionals: Deterministics, fitted parameters of the data, totals and differences. References are kept in a folder;
``--nuts`` makes those that are missing. Rivals are run in turn with ours. Rows are appended to a file; the table has
the last run of each model. From a checkout that is not installed, set ``PYTHONPATH`` to its root. Set
``OPENBLAS_NUM_THREADS=1`` to compare processor seconds.

Examples
--------
::

    python posteriors.py slopes linear growth --references REFERENCES --nuts
    python posteriors.py toenail hers insteval_linear --data DATA --stored STORED --references REFERENCES
    python posteriors.py nile --seeds 1 --out few.csv --table few.md
    python posteriors.py --list
"""

import argparse
import datetime
import logging
import tempfile
import time

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import posteriors_tables as tables

from environment import describe_environment
from functionals import deviations, kind_of
from functionals_references import Summary, sampled
from isolated import first_line, report, run_process, script
from measure import Array
from pages import write_between_marks
from posteriors_cases import CASES, Case
from posteriors_exact import of_normals
from posteriors_looks import Looks
from records import Records
from timed_fit import timed_fit

RESULTS = Path(__file__).parent / "results"
GROUPS = ("functional", "coordinate", "scalar")
OF_ERRORS = ("em", "es", "worst", "worst_at", "worst_sd", "worst_sd_at")
FIELDS = (
    "run", "model", "fit", "seed", "status", "n_dim", "kind", "posterior", "reliable", "verdict", "reasons", "khat",
    "theta_size", "pair_size", "size", "seconds", "cpu", "draws_seconds", "draws_cpu", "compile_seconds", "memory",
    *(f"{group}_{name}" for group in GROUPS for name in OF_ERRORS), "noise", "noise_most", "n_heavy", "reference_size",
    "rival", "rival_seconds", "rival_cpu", "note", "date", "environment",
)  # fmt: skip
N_DRAWS = 4_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that are named, and write the table; or, as a process of such a run, do one of its parts."""
    options = _parse_options(arguments)
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    if options.list:
        for name, case in CASES.items():
            print(name, *(f"needs {file}" for file in case.files), f"beside {case.rival_name}" if case.rival else "")
    elif options.part == "fit":
        fit(options.models[0], options)
    elif options.part == "reference":
        make_reference(options.models[0], options)
    else:
        records, run = Records(options.out, FIELDS), datetime.datetime.now().isoformat(timespec="seconds")
        for name in options.models:
            for row in measured(name, options):
                records.append({**row, "run": run, "date": run[:10], "environment": describe_environment()})
        if options.models or options.table_only:
            write_between_marks(options.table, tables.write(records.read(), list(CASES)), Path(__file__).name)


def measured(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Run the rival and ours, and return the rows: one of each fit."""
    case = CASES[name]
    missing = [file for file in case.files if options.data is None or not (options.data / file).exists()]
    if missing:
        print(f"{name}: left out, --data has no {', '.join(missing)}", flush=True)
        return []
    can_be_made = options.references is not None and (case.exact or options.nuts)
    if can_be_made and reference_of(name, case, options) is None:
        made = _process(name, "reference", options, options.nuts_limit * 2.0)
        print(f"{name}: reference {made.get('status', made.get('least', ''))}", flush=True)
    theirs: dict[str, object] = {}
    if case.rival and not options.no_rivals:
        with tempfile.TemporaryDirectory() as folder:
            found = case.rival(options.data, Path(folder), options.limit)
        theirs = {"rival": case.rival_name, "rival_seconds": found.get("seconds"), "rival_cpu": found.get("cpu")}
        print(f"{name}: {case.rival_name} {_shown(theirs, ('rival_seconds', 'rival_cpu'))}", flush=True)
    found = _process(name, "fit", options, options.limit)
    fits = [value for key, value in sorted(found.items()) if key.startswith("fit_")]
    rows = [{**dict(of), **theirs} for of in fits if isinstance(of, dict)]
    if not rows or found.get("status"):  # it ended early: what was measured stays measured
        rows = rows or [{"fit": "first", "seed": 1}]
        rows[-1] |= {"note": found.get("status") or found.get("note") or "no fit"}
    for row in rows:
        row["model"] = name
        names = ("fit", "seed", "kind", "verdict", "khat", "theta_size", "pair_size", "seconds", "cpu", "draws_cpu")
        errors = tuple(f"{group}_{of}" for group in GROUPS for of in ("em", "es", "worst", "worst_at"))
        print(f"{name}: {_shown(row, (*names, *errors, 'noise', 'note'))}", flush=True)
    return rows


def fit(name: str, options: argparse.Namespace) -> None:
    """Fit a model first and again, and report what is found of each fit, the seconds of all before the rest."""
    case, looked = CASES[name], []
    model = case.build(options.data)
    for number in range(max(2, options.seeds)):
        seed = min(number, options.seeds - 1) + 1
        approx, columns = timed_fit(model, {}, seed)
        row = {"fit": "warm" if number else "first", "seed": seed, **columns, "cpu": columns.get("cpu_seconds")}
        if approx is not None:
            start, cpu = time.perf_counter(), time.process_time()
            posterior = approx.sample(options.draws, random_seed=seed)["posterior"]
            row |= {"draws_seconds": time.perf_counter() - start, "draws_cpu": time.process_time() - cpu}
            row |= {"kind": kind_of(approx), "posterior": approx.record.posterior}
            row |= _sizes(approx, posterior, options.draws)
            looked.append((number, seed, row, approx, posterior))
        report(**{f"fit_{number}": row})
    reference = reference_of(name, case, options)
    looks = None if reference is None else Looks(model)
    for number, seed, row, approx, posterior in looked:
        try:
            row |= _judged(approx, seed)
            if looks is not None:
                row |= errors(looks(posterior), float(row["size"]), reference)
        except Exception as error:
            row["note"] = first_line(error)
        report(**{f"fit_{number}": row})


def _sizes(approx: Any, posterior: Any, n_draws: int) -> dict[str, object]:
    """Return k-hat and the effective sizes of weights, of hyperparameters and of pairs, and that of the draws."""
    size = min(n_draws, posterior.attrs.get("effective_sample_size", n_draws))
    names = {"khat": "khat", "theta_size": "effective_size", "pair_size": "pair_size"}
    known = {name: getattr(approx.checks, of, None) for name, of in names.items()}
    return {"size": float(size), **{name: float(value) for name, value in known.items() if value is not None}}


def _judged(approx: Any, seed: int) -> dict[str, object]:
    diagnosis = approx.diagnose(random_seed=seed)
    reasons = " | ".join(diagnosis.reasons)
    return {"reliable": int(diagnosis.reliable), "verdict": diagnosis.verdict, "reasons": reasons}


def errors(found: tuple[Array, list[str], int], size: float, reference: Summary) -> dict[str, object]:
    """Return errors of means and standard deviations, in those of a reference, of all that it has.

    ``em`` and ``es`` are root mean squares, ``worst`` the largest error of a mean, of functionals, coordinates, and
    coordinates that are numbers by themselves, as scales are.

    Parameters
    ----------
    found : tuple
        Draws, (n, k), their names, and the number of functionals, which come first.
    size : float
        Effective sample size of the draws.
    reference : Summary
    """
    draws, names, n_functionals = found
    where = {name: i for i, name in enumerate(names)}
    ours = Summary.of_draws(draws, names, n_functionals, 1, size)
    known = np.array([name in where for name in reference.names]) & reference.varies
    reference = reference.only(known)
    index = np.array([where[name] for name in reference.names])
    ours = Summary([names[i] for i in index], *(value[index] for value in ours[1:]))
    of_mean, of_sd, _, _, joint = deviations(ours, reference, draws[:, index])
    is_functional = index < n_functionals
    is_scalar = np.array(["[" not in name for name in reference.names]) & ~is_functional
    result: dict[str, object] = {}
    for group, members in zip(GROUPS, (is_functional, ~is_functional, is_scalar), strict=True):
        if members.any():
            of_group = _errors_of(of_mean, of_sd, members, ours.names)
            result |= {f"{group}_{name}": value for name, value in of_group.items()}
    heavy = int((reference.kurtosis > tables.HEAVY).sum())
    noise = {"noise": float(np.median(joint)), "noise_most": float(joint.max())}
    return {**result, **noise, "n_heavy": heavy, "reference_size": float(reference.size.min())}


def _errors_of(of_mean: Array, of_sd: Array, members: Array, names: list[str]) -> dict[str, object]:
    index = np.flatnonzero(members)
    mean, sd = (index[np.argmax(np.nan_to_num(np.abs(of[index]), nan=np.inf))] for of in (of_mean, of_sd))
    em, es = (float(np.sqrt(np.mean(of[index] ** 2))) for of in (of_mean, of_sd))
    values = (em, es, float(of_mean[mean]), names[mean], float(of_sd[sd]), names[sd])
    return dict(zip(OF_ERRORS, values, strict=True))


def reference_of(name: str, case: Case, options: argparse.Namespace) -> Summary | None:
    """Return what a posterior is compared with: what the folder has, or stored moments; None without."""
    if options.references is not None and (file := options.references / f"{name}.npz").exists():
        return Summary.read(file)
    if case.stored and options.stored is not None and (file := options.stored / f"{case.stored}.npz").exists():
        with np.load(file) as found:
            names, size = [str(n) for n in found["uncon_names"]], float(found["ess_min"])
            return of_normals(names, found["uncon_mean"], found["uncon_sd"], size)
    return None


def make_reference(name: str, options: argparse.Namespace) -> None:
    """Make the reference of a model, by NUTS where it is not known otherwise, and keep it."""
    case, file = CASES[name], options.references / f"{name}.npz"
    if case.exact and not options.nuts:
        found = case.exact(options.data)
    else:
        model = (case.sampled or case.build)(options.data)
        found = sampled(name, model, Looks(case.build(options.data)), options.nuts_limit, case.adaptation)
    found.write(file)
    report(least=f"effective size {found.least_size():,.0f} at least")


def _process(name: str, part: str, options: argparse.Namespace, limit: float) -> dict[str, object]:
    paths = [(f"--{of}", getattr(options, of)) for of in ("data", "references", "stored")]
    given = [word for option, path in paths if path is not None for word in (option, path)]
    numbers = ["--seeds", options.seeds, "--draws", options.draws, "--nuts-limit", options.nuts_limit]
    nuts = ["--nuts"] if options.nuts and not CASES[name].exact else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = script(__file__, name, *given, *numbers, *nuts, "--part", part)
        return run_process(command, Path(folder) / "compiled", limit)


def _shown(row: dict[str, object], names: Sequence[str]) -> str:
    known = ((name, row[name]) for name in names if row.get(name) not in (None, ""))
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in known)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="*", choices=[*CASES, []], metavar="NAME", help="--list shows them")
    parser.add_argument("--list", action="store_true", help="print the names, and measure nothing")
    parser.add_argument("--seeds", type=int, default=3, help="the first fit has seed 1, further ones 2, ...")
    parser.add_argument("--draws", type=int, default=N_DRAWS)
    parser.add_argument("--nuts", action="store_true", help="make references that are missing by NUTS (nutpie)")
    parser.add_argument("--nuts-limit", type=float, default=900.0, help="seconds after which no more chains are begun")
    parser.add_argument("--no-rivals", action="store_true", help="run ours alone")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds for one process")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder that references are kept in")
    parser.add_argument("--stored", type=Path, help="folder of stored moments of coordinates")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, write the table")
    parser.add_argument("--out", type=Path, default=RESULTS / "posteriors.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "posteriors.md", help="page with marks, or a new file")
    parser.add_argument("--part", choices=["fit", "reference"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (options.nuts or options.part == "reference") and options.references is None:
        parser.error("--nuts needs --references, the folder that references are kept in.")
    return options


if __name__ == "__main__":
    main()
