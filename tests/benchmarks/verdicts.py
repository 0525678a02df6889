"""Verdicts of `diagnose` on posteriors that a Gaussian fits and on posteriors that it does not, over seeds.

A run can be stopped and resumed: rows that are in the results file already are not run again. From a checkout that is
not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python verdicts.py --data DATA --references REFERENCES
    python verdicts.py --models funnel banana --seeds 3 --out small.csv --table small.md
    python verdicts.py --first-seed 101 --seeds 5 --out choice.csv --table choice.md
    python verdicts.py --seeds 0
"""

import argparse
import datetime
import sys
import warnings

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import numpy as np
import pymc as pm

from environment import describe_environment
from pages import column_of, measured_on, median, table, write_between_marks
from records import Records, Row

sys.path.append(str(Path(__file__).parents[1]))  # the targets are among the tests

from mixture_posteriors import EFFECTS, ERRORS, eight_schools
from mixture_targets import target

WRONG, RIGHT, SEEN = "not reliable", "reliable", "-"
#: Of the draws of a diagnosis.
DIAGNOSIS_SEED = 900_000
KEY = ("model", "seed")
FIELDS = (
    *KEY, "expected", "thorough", "n_dim", "family", "status", "gap", "reliable", "named", "khat", "effective",
    "mean_drift", "mean_drift_se", "mean_at", "sd_drift", "sd_drift_se", "sd_at", "log_p_drift", "acceptance",
    "n_gradients", "reasons", "date", "environment",
)  # fmt: skip

CAPTION = """\
Verdicts of `approx.diagnose()`, with `thorough=True` where it says so, on the Gaussian fit (seeds of fit and diagnosis
differ from row to row). "as it should": the verdict is the one expected. "named": a reason names the variable in
question. Drift: that of the coordinate where it is largest, in standard deviations of q (mean) and relative to them
(sd); "at": the coordinate where it is so most often. Medians over seeds, with the range.
"""


@dataclass(frozen=True)
class Case:
    """A model and the verdict that its fit should get.

    Parameters
    ----------
    build : callable
        Folders of data and of references to the model.
    expected : str
    names : tuple of str
        Variables of which a reason has to name one.
    thorough : bool
    options : dict
        Of ``pm.fit``.
    needs_data : bool
    """

    build: Callable[[Any, Any], pm.Model]
    expected: str
    names: tuple[str, ...] = ()
    thorough: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    needs_data: bool = False


def eight_schools_noncentred() -> pm.Model:
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
        z = pm.Normal("z", shape=8)
        pm.Normal("y", mu + tau * z, ERRORS, observed=EFFECTS)
    return model


def sign_unknown() -> pm.Model:
    """Two modes so far apart that no draw of one comes near the other."""
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 3.0)
        pm.Normal("y", theta**2, 0.5, observed=np.array([3.7, 4.1, 4.3, 3.9, 4.2, 3.8]))
    return model


def student_t_regression(free: bool) -> pm.Model:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(120, 4))
    y = x @ np.array([1.0, -0.5, 0.0, 2.0]) + 0.7 * rng.standard_t(3, size=120)
    with pm.Model() as model:
        beta, sigma = pm.Normal("beta", 0.0, 5.0, shape=4), pm.HalfNormal("sigma", 2.0)
        nu = pm.Gamma("nu", 2.0, 0.1) if free else 4.0
        pm.StudentT("y", nu=nu, mu=x @ beta, sigma=sigma, observed=y)
    return model


def ordered_logit() -> pm.Model:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(200, 3))
    y = np.digitize(x @ np.array([1.0, -0.7, 0.3]) + rng.logistic(size=200), [-1.0, 0.5, 2.0])
    ordered, start = pm.distributions.transforms.ordered, np.array([-1.0, 0.0, 1.0])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 3.0, shape=3)
        cut = pm.Normal("cut", 0.0, 4.0, shape=3, transform=ordered, initval=start)
        pm.OrderedLogistic("y", eta=x @ beta, cutpoints=cut, observed=y, compute_p=False)
    return model


def _known(name: str) -> Callable[[Any, Any], pm.Model]:
    return lambda data, references: target(name).build()


def _real(name: str) -> Callable[[Any, Any], pm.Model]:
    return lambda data, references: getattr(measure.load_models(references), name)(data)


CASES = {
    "funnel": Case(_known("funnel"), WRONG, ("v",)),
    "banana": Case(_known("banana"), WRONG, ("x1", "x2")),
    "two modes": Case(_known("two modes"), WRONG, ("x",), thorough=True, options=target("two modes").options),
    "unknown sign": Case(lambda *_: sign_unknown(), WRONG, ("theta",), thorough=True),
    "eight schools, centred": Case(lambda *_: eight_schools().build(), WRONG, ("tau",)),
    "toenail, centred": Case(_real("toenail_centred"), WRONG, ("s",), needs_data=True),
    "german": Case(_real("german"), RIGHT, needs_data=True),
    "heart": Case(_real("heart"), RIGHT, needs_data=True),
    "icu": Case(_real("icu"), RIGHT, needs_data=True),
    "Student-t regression": Case(lambda *_: student_t_regression(False), RIGHT),
    "ordered logit": Case(lambda *_: ordered_logit(), RIGHT),
    "Student-t, free df": Case(lambda *_: student_t_regression(True), SEEN, ("nu",)),
    "skewed logistic": Case(_known("skewed logistic"), SEEN, ("beta",)),
    "eight schools, non-centred": Case(lambda *_: eight_schools_noncentred(), SEEN, ("tau",)),
    "epilepsy": Case(_real("epilepsy"), SEEN, ("sd",), needs_data=True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    for name in options.models:
        case = CASES[name]
        if case.needs_data and not (options.data and options.references):
            print(f"{name}: skipped, it needs --data and --references", flush=True)
            continue
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            if (name, str(seed)) not in done:
                row = run(name, case, seed, options)
                records.append(row)
                print(name, seed, row["reliable"], row["named"], f"k-hat {row['khat']:.2f}", flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def run(name: str, case: Case, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Fit, diagnose, and return the row."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    with case.build(options.data, options.references), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status is in the row
        options_of_fit = {"posterior": "gaussian", **case.options}
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False, **options_of_fit)
    diagnosis = approx.diagnose(thorough=case.thorough, random_seed=DIAGNOSIS_SEED + seed)
    named = any(f"`{n}{end}" in reason for reason in diagnosis.reasons for n in case.names for end in "`[_")
    row = {
        "model": name,
        "seed": seed,
        "expected": case.expected,
        "thorough": int(case.thorough),
        "n_dim": approx.layout.n_dim,
        "family": approx.record.family,
        "status": str(approx.status),
        "gap": approx.gap,
        "reliable": int(diagnosis.reliable),
        "named": int(named),
        "khat": diagnosis.khat,
        "effective": diagnosis.weights.effective,
        "log_p_drift": diagnosis.log_p_drift.value,
        "acceptance": diagnosis.acceptance,
        "n_gradients": diagnosis.n_gradients,
        "reasons": " | ".join(diagnosis.reasons),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "environment": describe_environment(),
    }
    for of in ("mean", "sd"):
        drift = diagnosis.by_coordinate[f"{of}_drift"]
        at = int(np.argmax(np.abs(drift)))
        se = float(diagnosis.by_coordinate[f"{of}_drift_se"][at])
        row |= {f"{of}_drift": float(drift[at]), f"{of}_drift_se": se, f"{of}_at": approx.layout.label(at)}
    return row


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    if not rows:
        return "No results.\n"
    header = (
        "model", "d", "expected", "found reliable", "as it should", "named", "k-hat", "mean drift", "at", "sd drift",
        "at", "gradients",
    )  # fmt: skip
    cells = [_cells(name, [row for row in rows if row["model"] == name]) for name in CASES]
    return "\n".join([*measured_on(rows), CAPTION, *table(header, [row for row in cells if row]), ""])


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    of, first, n = column_of(rows), rows[0], len(rows)
    n_reliable = int(of("reliable").sum())
    right = {WRONG: n - n_reliable, RIGHT: n_reliable}.get(first["expected"])
    return [
        name + (", thorough" if first["thorough"] == "1" else ""),
        first["n_dim"],
        first["expected"],
        f"{n_reliable} of {n}",
        "-" if right is None else f"{right} of {n}",
        f"{int(of('named').sum())} of {n}" if CASES[name].names else "-",
        median(of("khat"), ".2f"),
        median(of("mean_drift"), "+.2f"),
        f"`{_usual(rows, 'mean_at')}`",
        median(of("sd_drift"), "+.2f"),
        f"`{_usual(rows, 'sd_at')}`",
        median(of("n_gradients"), ",.0f"),
    ]


def _usual(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows]
    return max(sorted(set(values)), key=values.count)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=20, help="how many; 0: only the table")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py")
    parser.add_argument("--out", type=Path, default=folder / "verdicts.csv")
    parser.add_argument("--table", type=Path, default=folder / "verdicts.md", help="page with marks, or a new file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
