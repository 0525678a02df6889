"""NUTS that starts from a Gaussian approximation beside NUTS with its own defaults: tuning draws, gradients, seconds.

Each run is a process of its own: first with an empty compile cache (cold), then with the cache that this has left
(warm). A run can be stopped and resumed: rows that are in the results file already are not run again, rows of runs
that failed are tried again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python sampler_init.py --data DATA --references REFERENCES
    python sampler_init.py --models german --methods default dense --data DATA --references REFERENCES
    python sampler_init.py --seeds 0
"""

import argparse
import datetime
import os
import tempfile
import time
import warnings

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pymc as pm

from environment import describe_environment
from isolated import report, run_process, script
from pages import column_of, measured_on, median, significant, table, write_between_marks
from records import Records, Row

MODELS = {"german": "German credit, logistic regression (d = 49)", "epilepsy": "epilepsy, Poisson GLMM (d = 126)"}
#: Numbers of tuning draws that are tried; the first of each is run cold, too.
METHODS = {
    "default": (1_000, 300, 100),
    "dense": (100, 50, 300),
    "diagonal": (300,),
    "nutpie": (1_000,),
    "nutpie, start": (300,),
}
CHAINS, DRAWS = 4, 1_000
#: What is asked of a run: R-hat below, and bulk and tail effective sample sizes above.
MOST_RHAT, LEAST_ESS = 1.01, 400
#: Of the starts, so that they are not the draws of the sampler.
START_SEED = 50_000
KEY = ("model", "method", "tune", "seed", "cache")
FIELDS = (
    *KEY, "rhat", "ess_bulk", "ess_tail", "tuning_gradients", "gradients", "divergences", "seconds", "fit_seconds",
    "fit_gradients", "fit_hessians", "load", "status", "note", "process_seconds", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
{CHAINS} chains of {DRAWS:,} draws, one after the other. `default`: PyMC's NUTS with its own start and mass matrix
(jitter, diagonal). `dense`, `diagonal`: the same NUTS with the starts of `sampler_init` and the covariance, or the
variances, of q, fixed: the step size alone is tuned. q is the Gaussian fit (`posterior="gaussian"`). `nutpie`: what
`pm.sample` runs where nutpie is installed. `nutpie, start`: the same with the start of `nutpie_kwargs`. R-hat is the
largest, effective sample sizes (ESS) are the smallest of all free variables. Gradients count leapfrog steps; the fit
adds the draws in the column beside. ESS by gradient: bulk, for 1,000 gradients, tuning included. Seconds are those of
fit, compilation and sampling together (warm: in a new process with a filled compile cache; cold: with an empty one);
ratio: to the seconds of `default` with {METHODS["default"][0]:,} tuning draws and the same seed. Other processes ran
on the machine at the same time (column `load` of the results): gradients are the better measure. Medians over seeds,
with the range.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the tables; or, as a process of such a run, one measurement."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(options)
        return
    records = Records(options.out, FIELDS)
    if options.seeds:
        measure.check_inputs(options.data, options.references, options.models)
        for model in options.models:
            run_model(records, model, options)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


def run_model(records: Records, model: str, options: argparse.Namespace) -> None:
    """Run what is missing of one model: cold, method after method, then warm, seed after seed."""
    records.drop(lambda row: not row["seconds"] and row["model"] == model)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for method in options.methods:
            missing = [key for key in _warm(model, method, options.seeds) if tuple(map(str, key)) not in done]
            cold = (model, method, METHODS[method][0], 1, "cold")
            if tuple(map(str, cold)) not in done:
                _record(records, cold, _run(cold, Path(folder), options))
            elif missing:  # the cache of the cold run is gone
                _run((*cold[:2], 1, *cold[3:]), Path(folder), options)
        for seed in range(1, options.seeds + 1):
            for method in options.methods:
                for key in _warm(model, method, options.seeds):
                    if key[3] == seed and tuple(map(str, key)) not in done:
                        _record(records, key, _run(key, Path(folder), options))


def _warm(model: str, method: str, seeds: int) -> list[tuple[Any, ...]]:
    return [(model, method, tune, seed, "warm") for seed in range(1, seeds + 1) for tune in METHODS[method]]


def _run(key: tuple[Any, ...], folder: Path, options: argparse.Namespace) -> dict[str, object]:
    folders = [f"--data={options.data}", f"--references={options.references}"]
    own = folder / key[1].replace(", ", "_")
    return run_process(script(__file__, *folders, "--cell", *key[:4]), own, options.limit)


def _record(records: Records, key: tuple[Any, ...], found: dict[str, object]) -> None:
    date = datetime.datetime.now().isoformat(timespec="seconds")
    row = dict(zip(KEY, key, strict=True)) | found | {"date": date, "environment": describe_environment()}
    records.append(row)
    print(*key, *(found.get(name, "") for name in ("rhat", "ess_bulk", "seconds", "status")), flush=True)


def run_cell(options: argparse.Namespace) -> None:
    """Sample, and report the figures as JSON."""
    import arviz_stats
    import nutpie  # noqa: F401  (imports are not timed)

    import pymc_ngvi  # noqa: F401

    name, method, tune, seed = options.cell[0], options.cell[1], int(options.cell[2]), int(options.cell[3])
    model = getattr(measure.load_models(options.references), name)(options.data)
    report(load=os.getloadavg()[0])
    start = time.perf_counter()
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sampler(method)(model, tune, seed)
    report(seconds=time.perf_counter() - start)
    posterior = found["posterior"].to_dataset()[[v.name for v in model.free_RVs]]
    report(
        rhat=_extreme(np.max, arviz_stats.rhat(posterior)),
        ess_bulk=_extreme(np.min, arviz_stats.ess(posterior, method="bulk")),
        ess_tail=_extreme(np.min, arviz_stats.ess(posterior, method="tail")),
        tuning_gradients=_steps(found["warmup_sample_stats"]),
        gradients=_steps(found["sample_stats"]),
        divergences=int(found["sample_stats"]["diverging"].sum()),
    )


def sampler(method: str) -> Callable[[Any, int, int], Any]:
    """Return the function from model, tuning draws and seed to draws."""
    return {
        "default": lambda model, tune, seed: _sample(tune, seed, nuts_sampler="pymc"),
        "dense": lambda model, tune, seed: _sample(tune, seed, **_init(seed, "dense").kwargs()),
        "diagonal": lambda model, tune, seed: _sample(tune, seed, **_init(seed, "diagonal").kwargs()),
        "nutpie": lambda model, tune, seed: _nutpie(model, tune, seed, {}),
        "nutpie, start": lambda model, tune, seed: _nutpie(model, tune, seed, _init(seed, "diagonal").nutpie_kwargs()),
    }[method]


def _init(seed: int, covariance: str) -> Any:
    start = time.perf_counter()
    approx = pm.fit(method="ngvi", posterior="gaussian", random_seed=seed, progressbar=False)
    init = approx.sampler_init(CHAINS, START_SEED + seed, covariance=covariance)
    seconds = time.perf_counter() - start
    report(fit_seconds=seconds, fit_gradients=approx.n_gradients, fit_hessians=approx.n_hessians)
    return init


def _sample(tune: int, seed: int, **options: Any) -> Any:
    return pm.sample(
        DRAWS, tune=tune, random_seed=seed, cores=1, progressbar=False, quiet=True, discard_tuned_samples=False,
        compute_convergence_checks=False, **{"chains": CHAINS, **options},
    )  # fmt: skip


def _nutpie(model: Any, tune: int, seed: int, options: dict[str, Any]) -> Any:
    import nutpie

    compiled = nutpie.compile_pymc_model(model, **options)
    return nutpie.sample(compiled, draws=DRAWS, tune=tune, chains=CHAINS, cores=1, seed=seed, progress_bar=False)


def _steps(stats: Any) -> int:
    """Return the number of leapfrog steps."""
    return int(stats["n_steps" if "n_steps" in stats.data_vars else "tree_size"].sum())


def _extreme(of: Callable[[Any], Any], values: Any) -> float:
    return float(of([of(value.values) for value in values.data_vars.values()]))


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown, one for each model."""
    rows = [row for row in rows if row["seconds"] and row["rhat"]]
    if not rows:
        return "No results.\n"
    lines = [*measured_on(rows), CAPTION]
    for model, title in MODELS.items():
        own = [row for row in rows if row["model"] == model]
        if own:
            cells = [
                _cells([row for row in own if (row["method"], row["tune"]) == (method, str(tune))], own)
                for method, tunes in METHODS.items()
                for tune in sorted(tunes)
                if any((row["method"], row["tune"]) == (method, str(tune)) for row in own)
            ]
            warm = {row["method"] for row in own if row["cache"] == "warm"}
            needed = [f"`{method}` {_needed(own, method)}" for method in METHODS if method in warm]
            lines += [
                f"## {title[0].upper()}{title[1:]}",
                "",
                *table(list(cells[0]), [list(c.values()) for c in cells]),
            ]
            asked = f"R-hat below {MOST_RHAT} and bulk and tail ESS above {LEAST_ESS}"
            lines += ["", f"Fewest of the tuning draws tried with {asked}, all seeds: {', '.join(needed)}.", ""]
    return "\n".join(lines)


def _needed(rows: Sequence[Row], method: str) -> str:
    """Return the smallest number of tuning draws that was enough with all seeds."""
    for tune in sorted(METHODS[method]):
        own = [row for row in rows if (row["method"], row["tune"], row["cache"]) == (method, str(tune), "warm")]
        if own and all(_is_enough(row) for row in own):
            return f"{tune:,}"
    return "none"


def _is_enough(row: Row) -> bool:
    return float(row["rhat"]) < MOST_RHAT and min(float(row["ess_bulk"]), float(row["ess_tail"])) > LEAST_ESS


def _cells(rows: Sequence[Row], of_model: Sequence[Row]) -> dict[str, str]:
    """Return what the table says of one method with one number of tuning draws, by column."""
    warm = [row for row in rows if row["cache"] == "warm"]
    of, of_cold = column_of(warm), column_of([row for row in rows if row["cache"] == "cold"])
    total = of("tuning_gradients") + of("gradients")
    fit = of("fit_gradients") + of("fit_hessians")
    return {
        "method": f"`{rows[0]['method']}`",
        "tuning draws": f"{int(rows[0]['tune']):,}",
        "seeds": str(len(warm)),
        "R-hat": median(of("rhat"), ".3f"),
        "bulk ESS": median(of("ess_bulk"), ",.0f"),
        "tail ESS": median(of("ess_tail"), ",.0f"),
        "gradients, tuning": significant(of("tuning_gradients")),
        "gradients, draws": significant(of("gradients")),
        "fit: draws": significant(fit),
        "ESS by gradient": median(1_000 * of("ess_bulk") / total, ",.1f") if len(total) else "-",
        "divergences": median(of("divergences"), ",.0f"),
        "warm, s": significant(of("seconds")),
        "ratio": significant(_ratios(warm, of_model)),
        "cold, s": significant(of_cold("seconds")),
    }


def _ratios(rows: Sequence[Row], of_model: Sequence[Row]) -> list[float]:
    """Return seconds over those of the default with the same seed."""
    tune = str(METHODS["default"][0])
    default = {
        row["seed"]: float(row["seconds"])
        for row in of_model
        if (row["method"], row["tune"], row["cache"]) == ("default", tune, "warm")
    }
    return [float(row["seconds"]) / default[row["seed"]] for row in rows if row["seed"] in default]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=2, help="run the seeds 1 to this; 0: only the tables")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py")
    parser.add_argument("--out", type=Path, default=folder / "sampler_init.csv")
    parser.add_argument("--table", type=Path, default=folder / "sampler_init.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=4, metavar=("MODEL", "METHOD", "TUNE", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
