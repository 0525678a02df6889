"""Seconds and memory of Gaussian fits by number of groups: random-intercept logistic regressions, and a Rasch model.

Each fit runs in a process of its own: first with an empty compile cache (cold), then with the cache that this has left
(warm). A run can be stopped and resumed: rows that are in the results file already are not run again. From a checkout
that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python scaling.py
    python scaling.py --family sparse --groups 100 1000 --persons 0
    python scaling.py --groups 30 60 --persons 60 --items 8 --out small.csv --table small.md
    python scaling.py --seeds 0
"""

import argparse
import datetime
import functools
import tempfile

from collections.abc import Sequence
from pathlib import Path

import models_glmm
import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from marginal import Marginal, Moments
from measure import Array
from pages import column_of, measured_on, median, significant, table, write_between_marks
from records import Records, Row
from timed_fit import FIT_FIELDS, moments_of, refusal, timed_fit

INTERCEPTS, RASCH = "intercepts", "rasch"
GROUPS = (100, 1_000, 10_000, 100_000)
DATA_SEED = 1
#: Below this many groups, seconds are those of building graphs.
MANY = 1_000
FIELDS = (
    "model", "family", "size", "n_items", "seed", "cache", "n_observations", *FIT_FIELDS, "em", "es", "exact", "z",
    "model_seconds", "process_seconds", "note", "date", "environment",
)  # fmt: skip
KEY = ("model", "family", "size", "n_items", "seed", "cache")

CAPTION = f"""\
Random-intercept logistic regressions, {models_glmm.GROUP_SIZE} observations a group, {len(models_glmm.TRUE_BETA)} fixed
effects, b ~ N(0, s), s ~ HalfNormal(3), centred; one simulated data set for each size. Rasch model: ability ~ N(0, 1)
of each person, difficulty ~ N(0, sd) of each item.

All fits are Gaussian ones (`posterior="gaussian"`). Seconds are those of the call of `pm.fit` (cold: with an empty
compile cache; warm: in a new process with the cache that the cold run has left); imports and building the model are
not included. Memory is the largest resident memory of the process (VmHWM), and in brackets what it was before the fit.
em is the root mean square over the global parameters (fixed effects and log s) of the error of the mean in exact
standard deviations, es that of the relative error of the standard deviation; "exact" is by quadrature over the
intercepts. z is the root mean square of (mean - truth) / sd, about 1 where the standard deviations are right; in the
Rasch model over the difficulties.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the tables; or, as a process of such a run, one fit."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(options)
        return
    records = Records(options.out, FIELDS)
    if options.seeds:
        run_missing(records, options)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


def run_missing(records: Records, options: argparse.Namespace) -> None:
    """Run what is missing, the small sizes first; rows that failed are tried again."""
    family = options.family or ""
    records.drop(lambda row: not row["seconds"] and row["family"] == family)
    subjects = [(INTERCEPTS, n, 0) for n in options.groups]
    subjects += [(RASCH, options.persons, options.items)] if options.persons else []
    for model, size, n_items in subjects:
        cells = [(1, "cold"), *((seed, "warm") for seed in range(1, options.seeds + 1))]
        done = {tuple(row[name] for name in KEY) for row in records.read()}
        missing = [c for c in cells if tuple(map(str, (model, family, size, n_items, *c))) not in done]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if missing and missing[0][1] == "warm":  # the cache of the cold run is gone
                _run(model, size, n_items, 1, Path(folder), options)
            for seed, cache in missing:
                found = _run(model, size, n_items, seed, Path(folder), options)
                found |= errors(model, size, n_items, found.pop("mean", None), found.pop("sd", None), cache)
                row = dict(zip(KEY, (model, family, size, n_items, seed, cache), strict=True)) | found
                date = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": date, "environment": describe_environment()})
                print(f"{model} {size} seed {seed} {cache}: {row.get('status')} {row.get('seconds', '')}", flush=True)
                if "seconds" not in found:  # it would end in the same way again
                    break


def _run(model: str, size: int, n_items: int, seed: int, folder: Path, options: argparse.Namespace) -> dict:
    family = ["--family", options.family] if options.family else []
    return run_process(script(__file__, *family, "--cell", model, size, n_items, seed), folder, options.limit)


def run_cell(options: argparse.Namespace) -> None:
    """Simulate, fit, and report the figures and the moments of the global parameters as JSON."""
    import time

    name, (size, n_items, seed) = options.cell[0], map(int, options.cell[1:])
    start = time.perf_counter()
    if name == RASCH:
        responses, _ = models_glmm.simulate_rasch(size, n_items, DATA_SEED)
        model, n, compared = models_glmm.rasch(responses), responses.size, ["difficulty"]
    else:
        data = models_glmm.simulate_logistic(size, DATA_SEED)
        model, n, compared = models_glmm.random_intercept_logistic(data), len(data.y), ["beta", "s"]
    report(n_observations=n, model_seconds=time.perf_counter() - start)
    chosen = {"posterior": "gaussian"} | ({"family": options.family} if options.family else {})
    if reason := refusal(model, chosen):
        report(status=f"skipped: {reason}")
        return
    approx, columns = timed_fit(model, chosen, seed)
    report(**columns)
    if approx is not None:
        mean, sd = moments_of(approx, compared)
        report(mean=mean.tolist(), sd=sd.tolist())


def errors(model: str, size: int, n_items: int, mean: object, sd: object, cache: str) -> dict[str, object]:
    """Return the columns that compare moments of global parameters with the exact ones and with the truth."""
    if mean is None or cache == "cold":
        return {}
    mean, sd = np.array(mean), np.array(sd)
    if model == RASCH:
        _, truth = models_glmm.simulate_rasch(size, n_items, DATA_SEED)
        return {"z": _rms((mean - truth) / sd)}
    truth = np.append(models_glmm.TRUE_BETA, np.log(models_glmm.TRUE_SD))
    exact = exact_moments(size)
    columns = {"em": _rms((mean - exact.mean) / exact.sd), "es": _rms(sd / exact.sd - 1), "exact": exact.how}
    return {**columns, "z": _rms((mean - truth) / sd)}


@functools.cache
def exact_moments(n_groups: int) -> Moments:
    """Return the exact moments of the global parameters for a simulated data set."""
    start = np.append(models_glmm.TRUE_BETA, np.log(models_glmm.TRUE_SD))
    return Marginal(models_glmm.simulate_logistic(n_groups, DATA_SEED)).moments(start)


def exponent(sizes: Array, seconds: Array) -> float:
    """Return a of seconds ~ sizes^a, by least squares in logarithms; NaN from fewer than two sizes."""
    if len(sizes) < 2:
        return np.nan
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown, one for each model and family asked for."""
    if not rows:
        return "No results.\n"
    lines = [*measured_on(rows), CAPTION]
    for model, family in dict.fromkeys((row["model"], row["family"]) for row in rows):
        own = [row for row in rows if (row["model"], row["family"]) == (model, family)]
        title = "Rasch model" if model == RASCH else "Random intercepts"
        lines += [f"### {title}, " + (f'`family="{family}"`' if family else "default"), "", *_table(own), ""]
        if model == INTERCEPTS:
            lines += [_exponents(own), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    header = ["groups", "d", "observations", "cold, s", "warm, s", "memory, MiB", "iterations", "gradients"]
    header += ["Hessians", "em", "es", "exact", "z", "chosen", "ended"]
    return table(header, [_line_of(of_size) for _, of_size in sorted(_by_size(rows).items())])


def _line_of(rows: Sequence[Row]) -> list[object]:
    warm = [row for row in rows if row["cache"] == "warm"]
    of, of_cold, first = column_of(warm), column_of([r for r in rows if r["cache"] == "cold"]), (warm or rows)[0]
    ends = [row["status"] + (f" ({row['note']})" if row["note"] else "") for row in warm or rows]
    size = f"{int(first['size']):,}" + (f" persons, {first['n_items']} items" if first["model"] == RASCH else "")
    return [
        size,
        f"{int(first['n_dim']):,}" if first["n_dim"] else "-",
        f"{int(first['n_observations'] or 0):,}",
        significant(of_cold("seconds")),
        significant(of("seconds")),
        f"{significant(of('memory'))} [{significant(of('memory_before'))}]",
        *(median(of(name), ",.0f") for name in ("n_iterations", "n_gradients", "n_hessians")),
        *(median(of(name), ".3f") for name in ("em", "es")),
        first["exact"] or "-",
        median(of("z"), ".2f"),
        first["chosen"] or "-",
        ", ".join(dict.fromkeys(ends)),
    ]


def _exponents(rows: Sequence[Row]) -> str:
    """Return the sentence on how seconds grow."""
    sizes, seconds = [], []
    for size, of_size in sorted(_by_size(rows).items()):
        values = column_of([row for row in of_size if row["cache"] == "warm"])("seconds")
        if len(values):
            sizes.append(size)
            seconds.append(float(np.median(values)))
    all_sizes, all_seconds = np.array(sizes, dtype=float), np.array(seconds)
    parts = [("over all sizes", np.full(len(sizes), True)), (f"from {MANY:,} groups on", all_sizes >= MANY)]
    found = [(where, exponent(all_sizes[kept], all_seconds[kept])) for where, kept in parts]
    said = [f"groups^{power:.2f} {where}" for where, power in found if np.isfinite(power)]
    return f"Warm seconds grow as {', '.join(said)} (least squares in logarithms)." if said else ""


def _by_size(rows: Sequence[Row]) -> dict[int, list[Row]]:
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        sizes.setdefault(int(row["size"]), []).append(row)
    return sizes


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", nargs="*", type=int, default=GROUPS, help="sizes of the regressions")
    parser.add_argument("--persons", type=int, default=5_000, help="of the Rasch model; 0: leave it out")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--family", help="the family to ask for; default: none, as users do")
    parser.add_argument("--seeds", type=int, default=3, help="run the seeds 1 to this; 0: only the tables")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=folder / "scaling.csv")
    parser.add_argument("--table", type=Path, default=folder / "scaling.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=4, metavar=("MODEL", "SIZE", "ITEMS", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
