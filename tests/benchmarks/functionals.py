"""Functionals of posteriors: are linear predictors, fitted means, sums and differences right, where one relies on them?

Thirty-eight models as users write them, with what they look at as Deterministics. Each fit runs in a process of its
own with an empty compile folder; 4,000 draws of it are compared with references (``functionals_references/``), which
``--make`` makes where they are missing. A run can be stopped and resumed: what is in the results file already is not
measured again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python functionals.py --make
    python functionals.py
    python functionals.py --models BYM2 CAR --seeds 1 --out few.csv --table few.md
    python functionals.py --tables
"""

import argparse
import datetime
import logging
import tempfile

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import functionals_references as references
import functionals_tables
import numpy as np

from environment import describe_environment
from functionals_models import MODELS, model_of
from functionals_references import Summary
from isolated import first_line, report, run_process, script
from measure import Array
from pages import write_between_marks
from records import Records
from scipy.stats import norm
from timed_fit import timed_fit

RESULTS = Path(__file__).parent / "results"
KEY = ("model", "seed")
FIELDS = (
    *KEY, "status", "kind", "posterior", "reliable", "verdict", "summary_reliable", "reasons", "n_dim", "n_functionals",
    "n_heavy",
    "worst_mean", "worst_mean_at", "rms_mean", "worst_sd", "worst_sd_at", "worst_limit", "worst_limit_at", "beyond",
    "beyond_at", "joint", "coordinate_mean", "coordinate_mean_at", "coordinate_rms", "coordinate_sd",
    "coordinate_sd_at", "coordinate_limit", "coordinate_limit_at", "ess", "reference_ess", "cold", "cold_cpu",
    "compile_seconds", "note", "date", "environment",
)  # fmt: skip
N_DRAWS = 4_000
#: A functional is right if its mean is this near, in standard deviations, and its standard deviation, relatively; or
#: within so many standard errors of both sets of draws together.
MEAN, SD, N_ERRORS = 0.15, 0.15, 3.0
#: Kurtosis from which on a few thousand draws do not tell a standard deviation, nor often the mean, whoever makes them:
#: of exp(eta) where eta has a standard deviation of .9 and more. Limits are compared there.
HEAVY = 50.0
LOW = references.LIMITS[0]
#: The standard error of such a normal quantile from a share of n independent draws, times the root of n.
_OF_QUANTILE = np.sqrt(LOW * (1.0 - LOW)) / norm.pdf(norm.ppf(LOW))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables; or, as a process of such a run, one of the measurements."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(options.cell[0], int(options.cell[1]), options.references)
        return
    if options.make:
        make(options)
        return
    records = Records(options.out, FIELDS)
    if not options.tables:
        done = {tuple(row[name] for name in KEY) for row in records.read()}
        for cell in ((name, seed) for seed in options.seeds for name in options.models):
            if tuple(map(str, cell)) not in done:
                row = dict(zip(KEY, cell, strict=True)) | {"status": "ok"} | _measured(cell, options)
                when = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": when, "environment": describe_environment()})
                print(*cell, *(f"{n} {row[n]}" for n in functionals_tables.SHOWN if n in row), sep=", ", flush=True)
    rows = sorted(records.read(), key=lambda row: (list(MODELS).index(row["model"]), int(row["seed"])))
    sizes = {name: least for name in MODELS if (least := references.least_size(name, options.references))}
    write_between_marks(options.table, functionals_tables.write_tables(rows, sizes), Path(__file__).name)
    print(functionals_tables.totals(rows))


def make(options: argparse.Namespace) -> None:
    """Make references that are missing."""
    for name in options.models:
        file = references.file_of(name, options.references)
        if not file.exists():
            found = references.make(name, options.limit)
            found.write(file)
            print(f"{name}: effective sizes of {found.least_size():.0f} and more", flush=True)


def run_cell(name: str, seed: int, folder: Path) -> None:
    """Fit a model and report what was found as JSON, each part as it is known."""
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    approx, columns = timed_fit(model_of(name), {}, seed)
    shown = {n: columns[n] for n in ("status", "compile_seconds", "n_dim") if n in columns}
    report(**shown, cold=columns.get("seconds"), cold_cpu=columns.get("cpu_seconds"))
    if approx is None:
        return
    report(kind=kind_of(approx), posterior=approx.record.posterior)
    try:
        tree = approx.sample(N_DRAWS, random_seed=seed)
        size = float(min(N_DRAWS, tree["posterior"].attrs.get("effective_sample_size", N_DRAWS)))
        draws, names, n_functionals = references.flattened(tree["posterior"], approx.model)
        ours = Summary.of_draws(draws, names, n_functionals, 1, size)
        report(**errors(ours, Summary.read(references.file_of(name, folder)), draws))
        diagnosis = approx.diagnose(random_seed=seed)
        report(reliable=int(diagnosis.reliable), verdict=diagnosis.verdict, reasons=" | ".join(diagnosis.reasons))
        report(summary_reliable=int("Reliable" in str(approx.summary(random_seed=seed))))
    except Exception as error:
        report(note=first_line(error))


def kind_of(approx: Any) -> str:
    """Return what a result is, in a word."""
    taken = None if approx.plan is None else approx.plan.taken
    return "Gaussian" if taken is None or taken.kind == "gaussian" else taken.kind


def errors(ours: Summary, reference: Summary, draws: Array) -> dict[str, object]:
    """Return the columns about errors, in standard deviations of the reference; constants are left out.

    ``beyond`` is the largest error of a functional's mean or standard deviation as a multiple of what is tolerated; of
    functionals with heavy tails, that of how many of our draws are beyond a limit of the reference, as a normal
    quantile.

    Raises
    ------
    ValueError
        If the names are not those of the reference.
    """
    if ours.names != reference.names:
        raise ValueError("the reference has other functionals or coordinates: make it anew")
    varies = reference.varies
    ours, reference, draws = ours.only(varies), reference.only(varies), draws[:, varies]
    of_mean, of_sd, of_limit, beyond, joint = deviations(ours, reference, draws)
    first, second = np.flatnonzero(reference.is_functional), np.flatnonzero(~reference.is_functional)
    at = {
        "worst_mean": _worst(of_mean, first),
        "worst_sd": _worst(of_sd, first),
        "worst_limit": _worst(of_limit, first),
        "beyond": _worst(beyond, first),
        "coordinate_mean": _worst(of_mean, second),
        "coordinate_sd": _worst(of_sd, second),
        "coordinate_limit": _worst(of_limit, second),
    }
    values = dict(zip(at, (of_mean, of_sd, of_limit, beyond, of_mean, of_sd, of_limit), strict=True))
    return {
        **{name: float(values[name][i]) for name, i in at.items()},
        **{f"{name}_at": reference.names[i] for name, i in at.items()},
        "rms_mean": float(np.sqrt(np.mean(of_mean[first] ** 2))),
        "coordinate_rms": float(np.sqrt(np.mean(of_mean[second] ** 2))),
        "joint": float(joint[at["beyond"]]),
        "n_functionals": len(first),
        "n_heavy": int((reference.kurtosis[first] > HEAVY).sum()),
        "ess": float(ours.size.min()),
        "reference_ess": float(reference.size.min()),
    }


def deviations(ours: Summary, reference: Summary, draws: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return errors of means, standard deviations and limits, by how much they are beyond what is tolerated, and noise.

    Noise is the standard error of a difference of means, in standard deviations. Where tails are heavy, means and
    standard deviations are not compared: their errors are 0.
    """
    sd, heavy = reference.sd, reference.kurtosis > HEAVY
    of_mean, of_sd = (ours.mean - reference.mean) / sd, ours.sd / sd - 1.0
    of_limit = np.maximum(np.abs(ours.low - reference.low), np.abs(ours.high - reference.high)) / sd
    joint, joint_sd = _joint_errors(ours, reference)
    beyond_mean = np.abs(of_mean) / np.maximum(MEAN, N_ERRORS * joint)
    beyond_sd = np.abs(of_sd) / np.maximum(SD, N_ERRORS * joint_sd)
    beyond = np.where(np.isfinite(of_mean) & np.isfinite(of_sd), np.maximum(beyond_mean, beyond_sd), np.inf)
    if heavy.any():
        by_share = _errors_of_shares(draws[:, heavy], reference.only(heavy))
        of_mean[heavy], of_sd[heavy], of_limit[heavy] = 0.0, 0.0, by_share
        beyond[heavy] = by_share / np.maximum(MEAN, N_ERRORS * _OF_QUANTILE * joint[heavy])
    return of_mean, of_sd, of_limit, beyond, joint


def _joint_errors(ours: Summary, reference: Summary) -> tuple[Array, Array]:
    """Return the standard errors of differences: of means, in standard deviations, and of these, relative."""
    both = 1.0 / ours.size + 1.0 / reference.size
    spread = 0.25 * np.maximum(reference.kurtosis - 1.0, 0.0)  # times 1 / n: the variance of a log sd
    return np.sqrt(both), np.sqrt(spread * (1.0 / ours.size_of_sd + 1.0 / reference.size_of_sd))


def _errors_of_shares(draws: Array, reference: Summary) -> Array:
    """Return by how many standard deviations of a normal the shares of draws beyond each limit are off, the larger."""
    below, above = np.mean(draws < reference.low, axis=0), np.mean(draws > reference.high, axis=0)
    error = np.maximum(np.abs(norm.ppf(below) - norm.ppf(LOW)), np.abs(norm.ppf(above) - norm.ppf(LOW)))
    result: Array = np.where(np.isfinite(draws).all(axis=0), error, np.inf)
    return result


def _worst(error: Array, index: Array) -> int:
    return int(index[np.argmax(np.nan_to_num(np.abs(error[index]), nan=np.inf))])


def _measured(cell: tuple[str, int], options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = script(__file__, "--references", options.references, "--cell", *cell)
        return run_process(command, Path(folder) / "compiled", options.limit)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--make", action="store_true", help="make references that are missing, and nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one fit, or one reference")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables")
    parser.add_argument("--references", type=Path, default=references.FOLDER, help="folder of the references")
    parser.add_argument("--out", type=Path, default=RESULTS / "functionals.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "functionals.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
