"""Prices of posteriors: processor seconds of the first fit and of warm ones, which posterior it is, and how good.

Each model is fitted in a process of its own, first with nothing of it compiled (kernels of the package are, by fits of
other models before), then again with each seed. Cells are ranges over seeds; functions are those that PyTensor
compiles for the first fit. Rows are appended to the table as they
finish, and what is in it is not measured again: compare two versions by two tables, with ``PYTHONPATH`` as their roots.
``--models`` also takes those of users' kinds (`users_models`). Set ``OPENBLAS_NUM_THREADS=1``.

Examples
--------
::

    python prices.py --data DATA --references REFERENCES --table before.md
    python prices.py --models growth "groups: radon" --seeds 1 2 3 --table few.md
"""

import argparse
import contextlib
import importlib.util
import logging
import shutil
import tempfile
import time

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from environment import describe_environment
from functionals import kind_of
from isolated import first_line, report, run_process, script
from measure import load_models
from pages import table
from posteriors_unstructured import by_nutpie
from prices_models import CASES, KNOWN, NESTED, REFERENCED, USERS
from pytensor.compile.maker import FunctionMaker
from timed_fit import timed_fit

from pymc_ngvi.posteriors.plan import Decision

HEADER = (
    "model", "functions", "first, s", "warm, s", "draws, s", "rival, s", "kind", "effective size", "k-hat", "v",
    "exact", "reliable", "sd", "note",
)  # fmt: skip
#: Models that are fitted before, so that kernels of the package are compiled: exact and nested posteriors.
PREPARED = ("groups: bambi poisson crossed", "groups: bambi slopes", "series and fields: latent process")
#: That are timed; for standard deviations that are known.
N_DRAWS, N_KNOWN = 4_000, 100_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that are named and not in the table; or, as a process of such a run, a part of it."""
    options = _parse_options(arguments)
    logging.getLogger("pymc").setLevel(logging.ERROR)
    if options.part:
        {"fit": fit, "sample": sample, "prepare": prepare}[options.part](options)
        return
    lines = options.table.read_text().splitlines() if options.table.exists() else []
    if not lines:
        lines = [describe_environment(), "", *table(HEADER, [])]
        options.table.write_text("\n".join(lines) + "\n")
    done = {line.split(" | ")[0].removeprefix("| ") for line in lines}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _process(PREPARED[0], "prepare", options, Path(folder))
        for name in (name for name in options.models if name not in done):
            line = table(HEADER, [row_of(name, options, Path(folder))])[-1]
            print(line, flush=True)
            with options.table.open("a") as file:
                file.write(line + "\n")


def row_of(name: str, options: argparse.Namespace, compiled: Path) -> list[object]:
    """Return the cells of a model."""
    files = [options.data / file if options.data else Path(file) for file in CASES[name].files]
    files += [options.references / "models.py" if options.references else Path("models.py")] * (name in REFERENCED)
    if missing := [file.name for file in files if not file.exists()]:
        return [name, *["-"] * (len(HEADER) - 2), f"left out: no {', '.join(missing)}"]
    found = _process(name, "fit", options, compiled)
    fits = [value for key, value in sorted(found.items()) if key.startswith("fit_") and isinstance(value, dict)]
    warm = fits[1:]
    seconds = ((fits[:1], "cpu_seconds"), (warm, "cpu_seconds"), (warm, "draws"))
    cells = [_range([of.get("functions") for of in fits[:1]], ".0f")]
    cells += [_range([of.get(key) for of in some], ".2f") for some, key in seconds]
    forms = {"kind": "", "size": ",.0f", "khat": ".2f", "v": ".2g", "exact": "", "reliable": "", "sd": ".4f"}
    cells += [_rival(name, options), *(_range([of.get(key) for of in warm], form) for key, form in forms.items())]
    cells[-1] += f" (right: {KNOWN[name][2]})" if name in KNOWN else ""
    notes = {str(of[key]) for of in fits for key in ("status", "note") if of.get(key)} - {"converged"}
    return [name, *cells, "; ".join(sorted(notes | {str(found[key]) for key in ("status", "note") if key in found}))]


def prepare(options: argparse.Namespace) -> None:
    """Compile kernels of the package."""
    for name in PREPARED:
        timed_fit(CASES[name].build(None), {}, 1)


def fit(options: argparse.Namespace) -> None:
    """Fit a model first and again, and report each fit: what it took before what is found of it."""
    name, model = options.models[0], _model_of(options.models[0], options)
    for number, seed in enumerate([options.seeds[0], *options.seeds]):
        with _counted() as functions:
            approx, row = timed_fit(model, {"posterior": "nested"} if name in NESTED else {}, seed)
        row["functions"] = len(functions)
        report(**{f"fit_{number}": row})
        if approx is not None and number:
            try:
                row |= _judged(approx, seed, KNOWN.get(name))
            except Exception as error:
                row["note"] = first_line(error)
            report(**{f"fit_{number}": row})


@contextlib.contextmanager
def _counted() -> Iterator[list[Any]]:
    """Yield a list to which each function that PyTensor compiles is added."""
    found, begin = [], FunctionMaker.__init__

    def noted(self: FunctionMaker, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        begin(self, *args, **kwargs)

    FunctionMaker.__init__ = noted
    try:
        yield found
    finally:
        FunctionMaker.__init__ = begin


def _judged(approx: Any, seed: int, known: tuple[str, int, float] | None) -> dict[str, object]:
    start = time.process_time()
    posterior = approx.sample(N_DRAWS, random_seed=seed)["posterior"]
    size = float(posterior.attrs.get("effective_sample_size", np.nan))
    of: dict[str, object] = {"draws": time.process_time() - start, "size": size}
    for key, at in (("khat", "khat"), ("v", "variance")):
        if (value := getattr(approx.checks, at, None)) is not None:
            of[key] = round(value, 4)
    if known:
        draws = approx.sample(N_KNOWN, random_seed=seed)["posterior"][known[0]]
        of["sd"] = float(draws.to_numpy().reshape(N_KNOWN, -1)[:, known[1]].std())
    tried = () if approx.plan is None else approx.plan.candidates
    of["note"] = "; ".join(f"{one.kind}: {one.reason}" for one in tried if one.outcome is Decision.FAILED)
    reliable = approx.diagnose(random_seed=seed).reliable
    return {**of, "kind": kind_of(approx), "exact": approx.record.is_exact, "reliable": reliable}


def sample(options: argparse.Namespace) -> None:
    """Sample a model by nutpie, and report what it took."""
    report(**by_nutpie(_model_of(options.models[0], options)))


def _rival(name: str, options: argparse.Namespace) -> str:
    """Return the processor seconds of what else fits a model, or why there are none."""
    rival, of = CASES[name].rival, CASES[name].rival_name or "nutpie"
    is_there = shutil.which("Rscript") if rival else importlib.util.find_spec("nutpie")
    if not is_there or options.no_rivals or name in NESTED:
        return "-" if is_there or name in NESTED else f"{of}: not installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        by_r = rival and rival(options.data, Path(folder), options.limit)
        found = by_r or _process(name, "sample", options, Path(folder))
    return f"{of}: {found.get('status') or _range([found.get('cpu')], '.1f')}"


def _model_of(name: str, options: argparse.Namespace) -> Any:
    if name in REFERENCED:
        return getattr(load_models(options.references), name)(options.data)
    return CASES[name].build(options.data)


def _process(name: str, part: str, options: argparse.Namespace, compiled: Path) -> dict[str, object]:
    paths = [(f"--{of}", getattr(options, of)) for of in ("data", "references")]
    given = [word for option, path in paths if path is not None for word in (option, path)]
    command = script(__file__, *given, "--part", part, "--models", name, "--seeds", *options.seeds)
    return run_process(command, compiled, options.limit)


def _range(values: Sequence[Any], form: str) -> str:
    """Return the least and the largest of numbers, how often something holds, or all words."""
    known = sorted(value for value in values if value is not None and value == value)
    if known and isinstance(known[0], bool):
        return f"{sum(known)} of {len(known)}"
    ends = [format(value, form) for value in ((known[0], known[-1]) if form and known else known)]
    return (" to " if form else ", ").join(dict.fromkeys(ends)) or "-"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    mine = [name for name in CASES if name not in USERS]
    parser.add_argument("--models", nargs="+", default=mine, choices=list(CASES), metavar="MODEL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one process")
    parser.add_argument("--no-rivals", action="store_true", help="run ours alone")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of reference posteriors, which has models.py")
    parser.add_argument("--table", type=Path, default=Path("prices.md"))
    parser.add_argument("--part", choices=["fit", "sample", "prepare"], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
