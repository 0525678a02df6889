"""Exact posteriors of hierarchical models: errors beside NUTS and beside the answer, cost, refusals, and rivals.

Parts: ``references`` (fits against long NUTS runs), ``schools`` (eight schools, against numerical integration),
``groups`` (10,000 groups: log m against 41 nodes), ``refusals`` (models that have no exact posterior), ``rivals``
(other methods on the references); and those of ``exact_checks.py``: ``evidence``, ``left_out`` and ``tails``, whose
results have a file of their own. A run can be stopped and resumed: what is in the results files already is not
measured again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python exact.py --data DATA --references REFERENCES
    python exact.py --data DATA --references REFERENCES --parts references --models epilepsy --seeds 1
    python exact.py --parts groups --large
    python exact.py --data DATA --references REFERENCES --parts evidence left_out tails
    python exact.py --tables
"""

import argparse
import datetime
import logging
import os
import tempfile

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import exact_checks
import exact_models
import exact_tables
import numpy as np

from environment import describe_environment
from exact_cells import N_CHECKED, N_DRAWS, OURS, Clock, fitted, outcome
from isolated import first_line, run_process, script
from pages import write_between_marks
from records import Records

from pymc_ngvi.core.status import NotExactError

REFERENCES = ("epilepsy", "toenail", "toenail_centred", "hers")
RIVALS, ON_RIVALS = ("rvb2", "psis", "advi", "laplace", "nutpie"), ("epilepsy", "toenail")
SCHOOLS = {"eight schools, centred": True, "eight schools, non-centred": False}
LARGE = "100,000 groups"
PARTS = ("references", "schools", "groups", "refusals", "rivals", *exact_checks.PARTS)
KEY = ("part", "model", "method", "seed")
FIELDS = (
    *KEY, "status", "fit_status", "is_exact", "verdict", "asked", "diagnosis", "khat", "ess", "em", "es", "em_moments",
    "es_moments", "worst_mean", "worst_mean_name", "worst_sd", "worst_sd_name", "log_evidence", "log_evidence_se",
    "elpd", "log_m_error", "mean_shift", "nodes", "cold_cpu", "seconds", "warm_cpu", "warm_seconds", "gaussian_cpu",
    "draw_cpu", "memory_before", "memory", "how", "note", "load", "date", "environment",
)  # fmt: skip
CHECK_FIELDS = ("part", "model", "item", "status", *exact_checks.FIELDS, "load", "date", "environment")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables."""
    options = _parse_options(arguments)
    records, of_checks = Records(options.out, FIELDS), Records(options.checks_out, CHECK_FIELDS)
    if not options.tables:
        done = {tuple(row[name] for name in KEY) for row in records.read()}
        for cell in cells(options):
            if tuple(map(str, cell)) in done:
                continue
            found = measured(*cell, options)
            row = dict(zip(KEY, cell, strict=True)) | {"status": "ok"} | found
            records.append(row | _when_and_where())
            print(*cell, row["status"], row.get("verdict", ""), f"em {row.get('em')}", flush=True)
        check(of_checks, options)
    write_between_marks(options.table, exact_tables.write(records.read(), of_checks.read()), Path(__file__).name)


def check(records: Records, options: argparse.Namespace) -> None:
    """Measure what is missing of the parts of ``exact_checks.py``."""
    done = {(row["part"], row["model"]) for row in records.read()}
    for part in (part for part in exact_checks.PARTS if part in options.parts):
        for model in (model for model in exact_checks.PARTS[part] if _wanted(model, options)):
            own = model in exact_checks.OWN
            if (part, model) in done or not (own or _is_there(model, options)):
                continue
            try:
                rows = [{"status": "ok"} | row for row in exact_checks.measured(part, model, options)]
            except Exception as error:
                rows = [{"status": first_line(error)}]
            for row in rows:
                records.append({"part": part, "model": model} | row | _when_and_where())
                print(part, model, *row.values(), flush=True)


def _when_and_where() -> dict[str, object]:
    date = datetime.datetime.now().isoformat(timespec="seconds")
    return {"load": os.getloadavg()[0], "environment": describe_environment(), "date": date}


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yield part, model, method and seed of all that is wanted, the first seed of everything first."""
    for part in options.parts:
        if part == "references":
            models = [name for name in REFERENCES if _wanted(name, options) and _is_there(name, options)]
            for seed in range(1, options.seeds + 1):
                yield from ((part, name, method, seed) for name in models for method in ("exact", "gaussian"))
        elif part == "rivals":
            models = [name for name in ON_RIVALS if _wanted(name, options) and _is_there(name, options)]
            yield from ((part, name, method, 1) for name in models for method in options.rivals)
        elif part == "schools":
            yield from ((part, name, "exact", s) for s in range(1, options.school_seeds + 1) for name in SCHOOLS)
        elif part == "groups":
            yield from ((part, f"{options.groups:,} groups", method, 1) for method in ("exact", "gaussian"))
            if options.large:
                yield part, LARGE, "exact", 1
        elif part == "refusals":
            yield from ((part, name, "exact", 1) for name in exact_models.WITHOUT if _wanted(name, options))


def measured(part: str, model: str, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is found of one cell."""
    if part in ("schools", "refusals"):
        try:
            return of_schools(SCHOOLS[model], seed) if part == "schools" else of_refusal(model, seed)
        except Exception as error:
            return {"status": first_line(error)}
    check = 0 if model == LARGE else options.check
    command = script(str(Path(__file__).with_name("exact_cells.py")), part, model, method, seed, "--check", check)
    if options.data:
        command += ["--data", str(options.data), "--references", str(options.references)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = run_process(command, Path(folder), options.limit)
        if part == "rivals":  # once more, with what was compiled; measuring compiles, too
            again = run_process([*command, "--measure"], Path(folder), options.limit)
            cold = {name: found.get(name) for name in ("cold_cpu", "seconds")}
            warm = {"warm_cpu": again.get("cold_cpu"), "warm_seconds": again.get("seconds")}
            found = {**again, **cold, **warm}
    found.pop("process_seconds")
    return found


def of_schools(centred: bool, seed: int) -> dict[str, Any]:
    """Fit eight schools in this process and compare with the answer; errors of the globals are those of mu and tau."""
    answer, model = exact_models.schools_answer(centred), exact_models.schools(centred)
    approx, cpu, seconds = fitted(model, seed, OURS["exact"])
    found = {"cold_cpu": cpu, "seconds": seconds, **outcome(approx)}
    draws = approx.draw_flat(N_DRAWS, random_seed=seed)
    for suffix, mean, sd in (
        ("", draws.mean(axis=0), draws.std(axis=0, ddof=1)),
        ("_moments", approx.mean_flat, approx.sd_flat),
    ):
        of_mean, of_sd = (mean - answer.mean) / answer.sd, sd / answer.sd - 1.0
        found |= {f"em{suffix}": float(np.sqrt(np.mean(of_mean**2))), f"es{suffix}": float(np.sqrt(np.mean(of_sd**2)))}
    i, j = np.argmax(np.abs(of_mean[:2])), np.argmax(np.abs(of_sd[:2]))
    names = ("mu", "tau_log__")
    found |= {"worst_mean": float(of_mean[i]), "worst_mean_name": names[i]}
    found |= {"worst_sd": float(of_sd[j]), "worst_sd_name": names[j]}
    if approx.record.is_exact:
        evidence = approx.log_marginal_likelihood
        left_out = approx.leave_out(random_seed=1)
        found |= {"log_evidence": evidence.value - answer.log_evidence, "log_evidence_se": evidence.se}
        found |= {"elpd": left_out.elpd - answer.elpd}
    return found | {"diagnosis": approx.diagnose().verdict}


def of_refusal(name: str, seed: int) -> dict[str, Any]:
    """Fit a model that has no exact posterior, and ask for one."""
    model = exact_models.WITHOUT[name]()
    gaussian_cpu = fitted(model, seed, OURS["gaussian"])[1]
    approx, cpu, seconds = fitted(model, seed, OURS["exact"])
    found = {"gaussian_cpu": gaussian_cpu, "warm_cpu": cpu, "seconds": seconds, **outcome(approx)}
    clock = Clock()
    try:
        fitted(model, seed, {"posterior": "exact"})
        found["asked"] = "nothing raised"
    except (ValueError, NotExactError) as error:
        found["asked"] = first_line(error)
    return found | {"note": f"asked for: {clock.read()[0]:.2f} processor seconds"}


def _wanted(model: str, options: argparse.Namespace) -> bool:
    return not options.models or model in options.models


def _is_there(name: str, options: argparse.Namespace) -> bool:
    """Tell whether the model and its reference are there; say so where they are not."""
    if options.references is None or options.data is None:
        print(f"{name} is skipped: give --data, the folder of the data sets, and --references, that of models.py")
        return False
    missing = [file for file in ("models.py", f"{name}.npz") if not (options.references / file).is_file()]
    if missing:
        print(f"{name} is skipped: {options.references} holds no {' and no '.join(missing)}")
    return not missing


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--models", nargs="+", help="only these; not of schools and groups")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=5, help="on the references: run the seeds 1 to this")
    parser.add_argument("--school-seeds", type=int, default=20, help="on eight schools: run the seeds 1 to this")
    parser.add_argument("--groups", type=int, default=10_000, help="of the simulated regression")
    parser.add_argument("--check", type=int, default=N_CHECKED, help="draws at which log m is checked")
    parser.add_argument("--large", action="store_true", help="100,000 groups, too")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=folder / "exact.csv")
    parser.add_argument("--checks-out", type=Path, default=folder / "exact_checks.csv", help="of the last three parts")
    parser.add_argument("--table", type=Path, default=folder / "exact.md", help="page with marks, or a new file")
    parser.add_argument("--tables", action="store_true", help="measure nothing, only write the tables")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    main()
