"""Effective draws for each gradient: moved posteriors beside nutpie as it comes.

Models that no structure helps with, and two Gaussian processes. Each run is a process of its own: first with an empty
compile cache (cold), then with the cache that this has left (warm). A run that takes longer than the limit is ended,
and counts as without result. A run can be stopped and resumed: rows that are in the results file already are not run
again. From a checkout that is not installed, set ``PYTHONPATH`` to its root, and ``OPENBLAS_NUM_THREADS=1`` to compare
processor seconds.

Examples
--------
::

    python moved.py --references REFERENCES
    python moved.py --models rare_events epidemic --seeds 1
    python moved.py --seeds 0
"""

import argparse
import resource
import signal
import tempfile
import time
import warnings

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arviz_stats
import numpy as np
import pymc as pm

from environment import today_and_here
from isolated import first_line, report, run_process, script
from pages import column_of, measured_on, significant, table, write_between_marks
from posteriors_cases import CASES
from records import Records, Row

import pymc_ngvi

MODELS = (
    "rare_events", "marketing_mix", "regularised_horseshoe", "motorcycle", "factors", "epidemic", "dirichlet_process",
    "near_binomial", "gp_additive", "gp_hierarchical",
)  # fmt: skip
METHODS = ("moved", "nutpie")
KEY = ("model", "method", "seed", "cache")
FIELDS = (
    *KEY, "status", "n_dim", "ess", "rhat", "divergences", "gradients", "tuning_gradients", "fit_gradients", "chains",
    "draws", "fit_seconds", "compile_seconds", "sample_seconds", "em", "es", "functional_em", "functional_es",
    "process_seconds", "note", "date", "environment",
)  # fmt: skip
N_DRAWS = 4_000
#: Seconds by the clock for each of the processor, on a machine that does other things as well.
_MOST_CLOCK = 8.0

CAPTION = """\
ESS: the smallest bulk effective sample size of free variables. For 1,000 gradients: of all, those of adaptation and
tuning included; in brackets, of ours, those of the Gaussian fit and of its Hessians, by what these cost, included as
well; of nutpie, those of its draws alone. Ratio: ours over nutpie's, by all gradients, and with those of the fit.
R-hat: nutpie's, of its four chains; what is above 1.01 is no answer (ours is judged before it is returned). Seconds are
of the processor, from the model to the draws: warm, in a new process with a filled compile cache; cold, with an empty
one; in brackets, nutpie's sampling alone. Medians of warm runs.
"""

ABOUT_ERRORS = """\
Errors of draws of moved posteriors beside long runs of NUTS, in standard deviations: em, root mean square of those of
means; es, of relative errors of standard deviations; of coordinates and of functionals, as on the page of
[posteriors](posteriors.md). The worst of the runs.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the tables; or, as a process of such a run, one measurement."""
    options = _parse_options(arguments)
    if options.cell:
        _end_after(options.limit)
        run_cell(*options.cell, options.references)
        return
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    for model in options.models if options.seeds else ():
        for method in options.methods:
            keys = [(model, method, "1", "cold"), *((model, method, str(s + 1), "warm") for s in range(options.seeds))]
            missing = [key for key in keys if key not in done]
            if not missing:
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                cold = _run(keys[0], Path(folder), options)  # for its cache, too
                for key in missing:
                    found = cold if key[-1] == "cold" else _run(key, Path(folder), options)
                    records.append(dict(zip(KEY, key, strict=True)) | found | today_and_here())
                    print(*key, found.get("ess"), found.get("gradients"), found.get("status", ""), flush=True)
                    if found.get("status"):
                        break  # it would end in the same way again
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


def _run(key: tuple[str, ...], folder: Path, options: argparse.Namespace) -> dict[str, object]:
    given = [] if options.references is None else ["--references", options.references]
    command = script(__file__, "--cell", *key[:3], "--limit", options.limit, *given)
    found = run_process(command, folder, _MOST_CLOCK * options.limit)
    if str(found.get("status", "")).startswith(f"error: exit code {-signal.SIGXCPU}"):
        found["status"] = f"more than {options.limit} s"
    return found


def _end_after(seconds: int) -> None:
    """Let the system end this process after so many seconds of the processor."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def run_cell(name: str, method: str, seed: str, references: Path | None) -> None:
    """Sample, and report the figures as JSON."""
    model = CASES[name].build(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (_moved if method == "moved" else _nutpie)(name, model, int(seed), references)


def _moved(name: str, model: pm.Model, seed: int, references: Path | None) -> None:
    from pymc_ngvi.core.prices import fit_seconds

    start = time.process_time()
    try:
        with model:
            approx: Any = pymc_ngvi.fit_ngvi(posterior="moved", random_seed=seed, progressbar=False)
    except pymc_ngvi.NotExactError as error:
        report(status=first_line(error), fit_seconds=time.process_time() - start)
        return
    seconds, record, checks = time.process_time() - start, approx.record, approx.checks
    report(fit_seconds=seconds)
    density = approx.density
    of_fit = fit_seconds(density, record.n_gradients, record.n_hessians, record.estimator) / density.gradient_seconds
    if record.step == "moved":  # no fit came first: what is left is the search for modes
        of_fit = record.n_gradients - checks.n_gradients
    report(
        n_dim=density.n_dim,
        gradients=checks.n_gradients,
        fit_gradients=round(of_fit),
        chains=checks.n_chains,
        draws=checks.n_draws,
        rhat=checks.rhat,
        ess=_least_size(approx.chains(), model),
    )
    if references is not None and (references / f"{name}.npz").exists():
        report(**_errors(approx, model, references / f"{name}.npz", seed))


def _nutpie(name: str, model: pm.Model, seed: int, references: Path | None) -> None:
    import nutpie

    times = [time.process_time()]
    compiled = nutpie.compile_pymc_model(model)
    times.append(time.process_time())
    tree = nutpie.sample(compiled, chains=4, cores=1, seed=seed, progress_bar=False)
    times.append(time.process_time())
    stats, rhat = tree["sample_stats"], arviz_stats.rhat(tree["posterior"].to_dataset()[_names(model)])
    report(
        compile_seconds=times[1] - times[0],
        sample_seconds=times[2] - times[1],
        n_dim=int(compiled.n_dim),
        gradients=int(stats["n_steps"].sum()),
        tuning_gradients=int(tree["warmup_sample_stats"]["n_steps"].sum()),
        divergences=int(stats["diverging"].sum()),
        chains=stats.sizes["chain"],
        draws=stats.sizes["draw"],
        rhat=max(float(value.max()) for value in rhat.data_vars.values()),
        ess=_least_size(tree, model),
    )


def _names(model: pm.Model) -> list[str]:
    return [variable.name for variable in model.free_RVs]


def _least_size(tree: Any, model: pm.Model) -> float:
    sizes = arviz_stats.ess(tree["posterior"].to_dataset()[_names(model)], method="bulk")
    return min(float(value.min()) for value in sizes.data_vars.values())


def _errors(approx: Any, model: pm.Model, file: Path, seed: int) -> dict[str, object]:
    """Return errors beside a reference, of coordinates and of functionals."""
    from functionals_references import Summary
    from posteriors import errors
    from posteriors_looks import Looks

    posterior = approx.sample(N_DRAWS, random_seed=seed)["posterior"]
    size = min(N_DRAWS, approx.checks.effective_size)
    found = errors(Looks(model)(posterior), size, Summary.read(file))
    columns = {"em": "coordinate_em", "es": "coordinate_es", "functional_em": "functional_em"}
    return {name: found.get(of) for name, of in {**columns, "functional_es": "functional_es"}.items()}


# --- tables -----------------------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    of = {name: {m: [row for row in rows if (row["model"], row["method"]) == (name, m)] for m in METHODS}
          for name in MODELS}  # fmt: skip
    cells = [_cells(name, *found.values()) for name, found in of.items() if all(found.values())]
    lines = (
        [*measured_on(rows), CAPTION, *table(list(cells[0]), [list(c.values()) for c in cells]), ""] if cells else []
    )
    errors = [_errors_of(name, found["moved"]) for name, found in of.items()]
    errors = [line for line in errors if line]
    if errors:
        header = ("model", "coordinates: em", "coordinates: es", "functionals: em", "functionals: es")
        lines += [ABOUT_ERRORS, *table(header, errors), ""]
    return "\n".join(lines)


def _cells(name: str, ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, str]:
    """Return what the table says of a model, by column."""
    of, other = _Run(ours), _Run(theirs)
    both = bool(of.warm and other.warm)
    return {
        "model": name,
        "d": next((row["n_dim"] for row in (*theirs, *ours) if row["n_dim"]), "-"),
        "ESS, moved": of.shown("ess") if of.warm else of.why,
        "nutpie": other.shown("ess") if other.warm else other.why,
        "its R-hat": f"{_median(other('rhat')):.3f}" if other.warm else "-",
        "gradients, moved": of.shown("gradients"),
        "nutpie ": significant(other("gradients") + other("tuning_gradients")) if other.warm else "-",
        "for 1,000, moved": _two(of.each, of.each_with_fit),
        "nutpie  ": _two(other.each, 1_000.0 * other("ess") / other("gradients")),
        "ratio": f"{_median(of.each) / _median(other.each):.2g}" if both else "-",
        "with the fit": f"{_median(of.each_with_fit) / _median(other.each):.2g}" if both else "-",
        "s warm, moved": of.seconds("warm"),
        "nutpie   ": other.seconds("warm"),
        "s cold, moved": of.seconds("cold"),
        "nutpie    ": other.seconds("cold"),
    }


class _Run:
    """Rows of one method on one model."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.warm = [row for row in rows if row["cache"] == "warm" and row["ess"]]
        self.why = next((row["status"] for row in rows if row["status"]), "-")

    def __call__(self, name: str) -> np.ndarray:
        return np.array([float(row[name] or 0.0) for row in self.warm])

    def shown(self, name: str) -> str:
        return significant(self(name)) if self.warm else "-"

    @property
    def each(self) -> np.ndarray:
        """ESS for 1,000 gradients."""
        return 1_000.0 * self("ess") / (self("gradients") + self("tuning_gradients"))

    @property
    def each_with_fit(self) -> np.ndarray:
        """The same with the gradients of a Gaussian fit."""
        return 1_000.0 * self("ess") / (self("gradients") + self("fit_gradients"))

    def seconds(self, cache: str) -> str:
        rows = [row for row in self._rows if row["cache"] == cache and row["ess"]]
        if not rows:
            return "-"
        ours, compiling, sampling = (column_of(rows)(f"{name}_seconds") for name in ("fit", "compile", "sample"))
        return significant(ours) if len(ours) else _two(compiling + sampling, sampling)


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _two(values: np.ndarray, others: np.ndarray) -> str:
    return f"{significant(values)} ({significant(others)})" if len(values) else "-"


def _errors_of(name: str, rows: Sequence[Row]) -> list[str]:
    of = column_of([row for row in rows if row["em"]])
    columns = [of(column) for column in ("em", "es", "functional_em", "functional_es")]
    return [name, *(f"{values.max():.2f}" if len(values) else "-" for values in columns)] if len(columns[0]) else []


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2, help="warm runs; 0 writes the tables alone")
    parser.add_argument("--limit", type=int, default=180, help="processor seconds for one process")
    parser.add_argument("--references", type=Path, help="folder of references, as of posteriors.py")
    parser.add_argument("--out", type=Path, default=folder / "moved.csv")
    parser.add_argument("--table", type=Path, default=folder / "moved.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seeds < 0:
        parser.error("--seeds should be at least 0")
    return options


if __name__ == "__main__":
    main()
