"""Examples of R-INLA: what was published for them, default fits of the same models, and long NUTS runs.

R-INLA itself is not run: means and standard deviations are those of its authors' papers and of a book. Each fit is made
in a process of its own with an empty compile folder; seconds are processor seconds of the fit. What is in the results
file already is not measured again. From a checkout that is not installed, set ``PYTHONPATH`` to its root. Set
``OPENBLAS_NUM_THREADS=1`` to compare processor seconds.

``--data`` is a folder with the files that ``tests/benchmarks/results/inla.md`` names.

References
----------
.. [1] Y. Fong, H. Rue and J. Wakefield (2010). Bayesian inference for generalized linear mixed models. Biostatistics
   11(3). https://doi.org/10.1093/biostatistics/kxp053
.. [2] N. Ravishanker, B. Raman and R. Soyer (2022). Dynamic time series models using R-INLA. Chapman and Hall/CRC.
   https://doi.org/10.1201/9781003134039

Examples
--------
::

    python inla.py --data DATA
"""

import argparse
import datetime
import tempfile
import time

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np

from environment import describe_environment
from inla_lattice import by_lattice
from inla_models import EXAMPLES
from inla_tables import write_tables
from isolated import report, run_process, script
from pages import write_between_marks
from records import Records
from timed_fit import timed_fit

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "example", "parameter", "published_mean", "published_sd", "mean", "sd", "by", "reference_mean", "reference_sd",
    "ess", "posterior", "verdict", "n_fits", "seconds", "reference_seconds", "status", "date", "environment",
)  # fmt: skip
OURS, REFERENCE = "ours", "reference"
N_DRAWS, N_TUNE, N_CHAINS, TARGET, SEED = 5_000, 1_500, 4, 0.95, 7
#: Examples whose posterior is integrated on a lattice, since NUTS sees one of its two modes only.
ON_LATTICE = ("Musa, AR(1)",)


def moments(draws: Any, names: Sequence[str]) -> dict[str, list[float]]:
    """Return mean, standard deviation and effective sample size of each quantity that was published."""
    found = {}
    for name in names:
        values = draws[name.removeprefix("sd of ")].to_numpy().astype(float)
        values = values**-0.5 if name.startswith("sd of ") else values
        found[name] = [float(values.mean()), float(values.std()), float(az.ess(values))]
    return found


def run_ours(name: str, data: Path) -> None:
    """Fit by default, and report moments and verdict."""
    example = EXAMPLES[name]
    approx, columns = timed_fit(example.model(data, True), {}, 1)
    report(status=columns["status"], seconds=columns.get("cpu_seconds"))
    if approx is None:
        return
    kind = "exact" if approx.record.is_exact else "nested" if approx.record.is_nested else "Gaussian"
    checks = getattr(approx, "checks", None)
    verdict = "; ".join(checks.failures) or "reliable" if checks is not None else approx.record.posterior
    draws = approx.sample(40_000, random_seed=2)["posterior"]
    report(moments=moments(draws, list(example.published)), posterior=kind, verdict=verdict)
    report(n_fits=getattr(checks, "n_fits", None))


def run_reference(name: str, data: Path) -> None:
    """Sample by NUTS from the same posterior, or integrate it on a lattice, and report moments."""
    import nutpie

    example, start = EXAMPLES[name], time.process_time()
    if name in ON_LATTICE:
        report(moments={k: [*v, np.inf] for k, v in by_lattice(data).items()}, by="lattice")
    else:
        draws = nutpie.sample(
            nutpie.compile_pymc_model(example.model(data, False)), draws=N_DRAWS, tune=N_TUNE, chains=N_CHAINS, cores=1,
            seed=SEED, target_accept=TARGET, progress_bar=False,
        )  # fmt: skip
        report(moments=moments(draws["posterior"], list(example.published)), by="NUTS")
    report(seconds=time.process_time() - start)


def measure(name: str, data: Path, limit: float) -> list[dict[str, object]]:
    """Fit, sample, and return a row for each published quantity."""
    found = {}
    for part in (OURS, REFERENCE):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            command = script(__file__, "--data", data, "--cell", part, name)
            found[part] = run_process(command, Path(folder) / "compiled", limit)
    ours, reference = found[OURS], found[REFERENCE]
    shared = {key: ours.get(key) for key in ("posterior", "verdict", "n_fits", "seconds", "status")}
    shared |= {"by": reference.get("by"), "reference_seconds": reference.get("seconds")}
    rows = []
    for parameter, published in EXAMPLES[name].published.items():
        own = ours.get("moments", {}).get(parameter, [None] * 3)
        known = reference.get("moments", {}).get(parameter, [None] * 3)
        row = {"example": name, "parameter": parameter, "mean": own[0], "sd": own[1]}
        row |= dict(zip(("published_mean", "published_sd"), published or (None, None), strict=True))
        rows.append(row | dict(zip(("reference_mean", "reference_sd", "ess"), known, strict=True)) | shared)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write the tables; or, as a process of such a run, one of the fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder with the data sets; without it, tables alone")
    parser.add_argument("--examples", nargs="*", choices=list(EXAMPLES), default=list(EXAMPLES), metavar="EXAMPLE")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=RESULTS / "inla.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "inla.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=2, metavar=("PART", "EXAMPLE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        (run_ours if options.cell[0] == OURS else run_reference)(options.cell[1], options.data)
        return
    records = Records(options.out, FIELDS)
    done = {row["example"] for row in records.read()}
    for name in options.examples if options.data is not None else ():
        if name in done:
            continue
        missing = [file for file in EXAMPLES[name].files if not (options.data / file).exists()]
        if missing:
            print(f"{name}: left out, for there is no {', '.join(missing)}")
            continue
        when = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "environment": describe_environment()}
        for row in measure(name, options.data, options.limit):
            records.append(row | when)
            print(*(row[key] for key in list(row)[:9]), row["seconds"], row["verdict"], flush=True)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


if __name__ == "__main__":
    main()
