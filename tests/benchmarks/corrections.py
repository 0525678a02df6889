"""What corrections after a fit gain: importance weights.

All seeds of a data set run in one process, a process per data set. A run can be stopped and resumed: rows that are in
the results file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python corrections.py --data DATA --references REFERENCES
    python corrections.py --models heart --seeds 1 --out small.csv --table small.md --data DATA --references REFERENCES
    python corrections.py --seeds 0
"""

import argparse
import datetime
import re
import subprocess
import sys
import warnings

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pymc as pm

from environment import describe_environment
from measure import Array, Reference
from pages import column_of, measured_on, median, table, write_between_marks
from records import Records, Row

DEFAULT, RVB2, DIAGONAL = "default", "rvb2", "diagonal"
#: Options of ``pm.fit``; more draws than by default, so that the diagonal family converges.
FITS = {DEFAULT: {"posterior": "gaussian"}, RVB2: {"reparam": "rvb2"}, DIAGONAL: {"family": "diagonal", "n_draws": 128}}
MODELS = {
    "heart": (DEFAULT, DIAGONAL),
    "icu": (DEFAULT, DIAGONAL),
    "german": (DEFAULT, DIAGONAL),
    "epilepsy": (DEFAULT, RVB2),
    "toenail": (DEFAULT,),
    "toenail_centred": (DEFAULT,),
    "hers": (DEFAULT,),
}
#: Draws of q behind weighted moments; fewer where a draw is dear.
DRAWS, FEWER = 40_000, {"toenail": 20_000, "toenail_centred": 20_000, "hers": 10_000}
RESAMPLED = 2_000
WEIGHTS_SEED, RESAMPLED_SEED = 100_000, 200_000
ASKED_ERROR, ASKED_KHAT = 0.03, 0.6

KEY = ("model", "fit", "seed")
FIELDS = (
    *KEY, "status", "n_dim", "draws", "khat", "em", "es", "psis_em", "psis_es", "ess",
    "psir_em", "psir_es", "reference_error", "note", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
em is the root mean square over unconstrained coordinates of the error of the mean in reference (NUTS) standard
deviations, es that of the relative error of the standard deviation; the Monte Carlo error of the reference's own means
is in the last column. Medians over seeds, with the range. q: exact moments of the fitted approximation. PSIS:
`corrected` with so many draws, and their effective sample size. PSIR: {RESAMPLED:,} resampled draws, equally weighted;
their number alone makes em {RESAMPLED**-0.5:.3f} and es {(2 * RESAMPLED) ** -0.5:.3f}. Refused: k-hat says that weights
can't help.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, a process per data set, and write the tables."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    if options.worker:
        run_model(records, options.models[0], options)
        return
    for name in options.models:
        if missing(records, name, options.seeds):
            measure.check_inputs(options.data, options.references, [name])
            code = subprocess.run(_worker_command(name, options), check=False).returncode
            if code:
                print(f"{name}: stopped with exit code {code}", file=sys.stderr)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


def missing(records: Records, name: str, n_seeds: int) -> list[tuple[str, int]]:
    """Return the fits and seeds of a data set that are not in the results yet."""
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    cells = [(fit, seed) for fit in MODELS[name] for seed in range(1, n_seeds + 1)]
    return [(fit, seed) for fit, seed in cells if (name, fit, str(seed)) not in done]


def run_model(records: Records, name: str, options: argparse.Namespace) -> None:
    """Run what is missing of one data set and append a row for each."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    model = getattr(measure.load_models(options.references), name)(options.data)
    path = options.references / f"{name}.npz"
    reference = Reference.read(path)
    for fit, seed in missing(records, name, options.seeds):
        with model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the status is in the row
            approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **FITS[fit])
        row = {"model": name, "fit": fit, "seed": seed, "n_dim": approx.layout.n_dim, "status": str(approx.status)}
        row |= {"reference_error": reference_error(path)}
        row |= assess(approx, model, reference, FEWER.get(name, DRAWS), seed)
        date = datetime.datetime.now().isoformat(timespec="seconds")
        records.append({**row, "date": date, "environment": describe_environment()})
        print({key: value for key, value in row.items() if not isinstance(value, str)}, row["note"], flush=True)


def assess(approx: Any, model: pm.Model, reference: Reference, draws: int, seed: int) -> dict[str, object]:
    """Return the errors of q and of what corrects it, as columns."""
    names = measure.coordinate_names(model)
    values = [v.value_name for v in approx.layout.variables]
    errors = reference.errors(names, approx.mean_flat, approx.sd_flat)
    row: dict[str, object] = {"draws": draws, "em": errors.em, "es": errors.es, "note": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in the row
            found = approx.corrected(draws, random_seed=WEIGHTS_SEED + seed)
            tree = found.sample(RESAMPLED, chains=1, random_seed=RESAMPLED_SEED + seed, include_transformed=True)
    except ValueError as refusal:
        found = re.search(r"k-hat is (\S+),", str(refusal))
        row |= {"note": f"refused: {refusal}", "khat": float(found[1]) if found else None}
    else:
        errors = reference.errors(names, found.mean_flat, found.sd_flat)
        row |= {"psis_em": errors.em, "psis_es": errors.es}
        row |= {"khat": found.checks.khat, "ess": found.checks.effective_size}
        resampled = [tree["posterior"][name].isel(chain=0) for name in values]
        errors = reference.errors(
            names, *(flat([getattr(x, m)("draw").values for x in resampled]) for m in ("mean", "std"))
        )
        row |= {"psir_em": errors.em, "psir_es": errors.es}
    return row


def flat(values: Sequence[Array]) -> Array:
    """Return values of variables as one vector."""
    return np.concatenate([np.ravel(value) for value in values])


def reference_error(path: Path) -> float:
    """Return the root mean square of the Monte Carlo errors of the reference's means, in its standard deviations."""
    with np.load(path) as file:
        kind = "uncon_" if "uncon_mcse_mean" in file else ""
        return float(np.sqrt(np.mean((file[f"{kind}mcse_mean"] / file[f"{kind}sd"]) ** 2)))


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    cells = [(name, fit) for name in MODELS for fit in MODELS[name]]
    groups = {cell: own for cell in cells if (own := [row for row in rows if (row["model"], row["fit"]) == cell])}
    lines = [*measured_on(rows), CAPTION, "## Importance weights", ""]
    header = (
        "data", "fit", "dim", "draws", "k-hat", "em, q", "em, PSIS", "em, PSIR", "es, q", "es, PSIS", "es, PSIR",
        "effective size", "refused", "reference",
    )  # fmt: skip
    lines += [*table(header, [_weights_line(own) for own in groups.values()]), ""]
    return "\n".join([*lines, *_asked(rows), ""])


def _weights_line(rows: Sequence[Row]) -> list[str]:
    of = column_of(rows)
    errors = [median(of(name), ".3f") for name in ("em", "psis_em", "psir_em", "es", "psis_es", "psir_es")]
    refused = sum(not row["psis_em"] for row in rows)
    return [
        rows[0]["model"], f"`{rows[0]['fit']}`", rows[0]["n_dim"], f"{int(rows[0]['draws']):,}",
        median(of("khat"), ".2f"), *errors, median(of("ess"), ",.0f"), f"{refused} of {len(rows)}",
        median(of("reference_error")[:1], ".3f"),
    ]  # fmt: skip


def _asked(rows: Sequence[Row]) -> list[str]:
    """Return the lines on what was asked of the weights."""
    near = [row for row in rows if row["khat"] and float(row["khat"]) < ASKED_KHAT]
    met = [row for row in near if row["psis_em"] and max(float(row["psis_em"]), float(row["psis_es"])) <= ASKED_ERROR]
    judged = [row for row in rows if row["psis_em"]]
    # The reference's own error can hide that of q by chance: it counts, too.
    worse = [
        row
        for row in judged
        if any(float(row[f"psis_{e}"]) > _together(row, e, "reference_error") for e in ("em", "es"))
    ]
    return [
        f"Fits with k-hat below {ASKED_KHAT:g}: {len(near)}; em and es of PSIS both at most {ASKED_ERROR:g} in "
        f"{len(met)} of them.",
        f"Fits whose em or es grows by more than the error of the reference: {len(worse)} of {len(judged)}.",
    ]


def _together(row: Row, *names: str) -> float:
    """Return the square root of the sum of squares of some columns."""
    return float(np.linalg.norm([float(row[name]) for name in names]))


def _worker_command(name: str, options: argparse.Namespace) -> list[str]:
    """Return the command that runs one data set in a process of its own."""
    command = [sys.executable, __file__, "--worker", "--models", name, "--seeds", str(options.seeds)]
    return [*command, "--data", str(options.data), "--references", str(options.references), "--out", str(options.out)]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=3, help="run the seeds 1 to this; 0: only the tables")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--out", type=Path, default=folder / "corrections.csv")
    parser.add_argument("--table", type=Path, default=folder / "corrections.md", help="page with marks, or a new file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
