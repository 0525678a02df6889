"""What the search for other modes takes beside the fit, on ordinary models: whole fits with it and without.

Each model is fitted in processes of its own, in turns with the search and without: once cold, with nothing compiled
yet, and then again several times in the same process. The least of the repetitions counts, as others on the machine
only ever make them longer.

Examples
--------
::

    python modes_price.py
    python modes_price.py --cases "groups: radon" --repeats 1 --out small.csv --table small.md
"""

import argparse
import datetime
import os
import sys
import tempfile
import time
import warnings

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pymc as pm

from environment import describe_environment
from isolated import first_line, report, run_process, script
from pages import measured_on, table, write_between_marks
from records import Records, Row
from users_models import MODELS as USERS

TESTS = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
#: Of the battery of `users.py`, but for the first two.
CASES = (
    "epilepsy", "random intercepts",
    "groups: eight schools centred", "groups: eight schools noncentred", "groups: radon",
    "groups: bambi poisson crossed", "groups: bambi slopes", "groups: two parameter items",
    "counts and survival: negative binomial", "regression: horseshoe", "regression: ordered logit",
    "regression: robust", "regression: logistic", "series and fields: autoregression",
    "series and fields: latent process", "series and fields: local level", "structured: normal mixture",
)  # fmt: skip
N_WARM, LIMIT = 3, 300.0
KEY = ("case", "search", "repeat")
FIELDS = (*KEY, "cold", "warm", "n_dim", "searched", "posterior", "note", "date", "environment")

CAPTION = """\
Seconds of processors of a whole default fit with the search and without: cold, the first fit in a process, compiling
included, and warm, another fit of the same model. The least of the repetitions counts. Not searched are models whose
log p is known to be concave, and those whose posterior is found without a Gaussian fit.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    if options.worker:
        measure(options.cases[0], search=options.worker == "on")
        return
    records = Records(options.out, FIELDS)
    done = {tuple(row[name] for name in KEY) for row in records.read()}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            for repeat in range(1, options.repeats + 1):
                for search in ("off", "on"):
                    if (name, search, str(repeat)) in done:
                        continue
                    command = script(__file__, "--worker", search, "--cases", name)
                    found = run_process(command, Path(folder) / f"{CASES.index(name)}-{repeat}-{search}", LIMIT)
                    row = {key: value for key, value in found.items() if key in FIELDS}
                    date = datetime.datetime.now().isoformat(timespec="seconds")
                    row |= {"case": name, "search": search, "repeat": repeat, "date": date}
                    records.append(row | {"environment": describe_environment()})
                    print(name, search, row.get("cold", ""), row.get("warm", ""), row.get("note", ""), flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def measure(name: str, *, search: bool) -> None:
    """Fit a model several times and print the columns of its row."""
    import pymc_ngvi

    from pymc_ngvi.fitting.modes import ModeSearch

    warnings.simplefilter("ignore")  # of how fits end
    if not search:
        ModeSearch.of = classmethod(lambda cls, *_: None)
    try:
        model, seconds = _model(name), []
        inference = pymc_ngvi.NGVI(model, random_seed=1)
        for _ in range(1 + N_WARM):
            before = _processor()
            approx = inference.fit(progressbar=False)
            seconds.append(_processor() - before)
        report(
            cold=seconds[0], warm=min(seconds[1:]), n_dim=approx.layout.n_dim, searched=int(approx.record.searched),
            posterior=approx.record.posterior,
        )  # fmt: skip
    except Exception as error:
        report(note=first_line(error))


def _model(name):
    if name == "random intercepts":
        return _intercepts()
    if name != "epilepsy":
        return USERS[name][1]()
    sys.path.append(str(TESTS))
    from real_models import epilepsy

    return epilepsy()


def _intercepts() -> pm.Model:
    """Return a logistic regression with 50 groups of 10."""
    rng, group = np.random.default_rng(1), np.repeat(np.arange(50), 10)
    x = rng.normal(size=500)
    score = 0.5 + 0.8 * x + 0.7 * rng.normal(size=50)[group]
    with pm.Model() as model:
        a, b, t = pm.Normal("a", 0, 5), pm.Normal("b", 0, 2), pm.HalfNormal("t", 1)
        u = pm.Normal("u", 0, t, shape=50)
        pm.Bernoulli("y", logit_p=a + b * x + u[group], observed=rng.random(500) < 1 / (1 + np.exp(-score)))
    return model


def _processor() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    rows = [row for row in rows if row["cold"]]
    if not rows:
        return "No results.\n"
    lines, ratios = [], []
    measured = {(row["case"], row["search"]) for row in rows}
    for name in (name for name in CASES if {(name, "off"), (name, "on")} <= measured):
        least = {}
        for search in ("off", "on"):
            of = [row for row in rows if row["case"] == name and row["search"] == search]
            least[search] = [min((float(row[key]) for row in of), default=float("nan")) for key in ("cold", "warm")]
        [on, *_] = [row for row in rows if row["case"] == name and row["search"] == "on"]
        ratio = [with_ / without for with_, without in zip(least["on"], least["off"], strict=True)]
        if on["searched"] == "1":
            ratios.append(ratio)
        cells = [f"{least[search][k]:.2f}" for k in range(2) for search in ("off", "on")]
        cells = [*cells[:2], f"{ratio[0] - 1.0:+.0%}", *cells[2:], f"{ratio[1] - 1.0:+.0%}"]
        lines.append([name, on["n_dim"], "yes" if on["searched"] == "1" else "no", *cells])
    middle = [sorted(ratio[k] for ratio in ratios)[len(ratios) // 2] - 1.0 for k in range(2)] if ratios else [0.0, 0.0]
    summary = f"Where there was something to look for, the median is {middle[0]:+.0%} cold and {middle[1]:+.0%} warm."
    header = ("model", "coordinates", "searched", "cold without, s", "with, s", "", "warm without, s", "with, s", "")
    return "\n".join([*measured_on(rows), CAPTION, summary, "", *table(header, lines), ""])


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "modes_price.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "modes.md", help="page with marks, or new")
    parser.add_argument("--worker", choices=["off", "on"], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
