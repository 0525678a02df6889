"""Mixtures and Student-t beside the single Gaussian: on densities that are known exactly, and on posteriors.

Each fit runs in a process of its own: first with an empty compile cache (cold), then with the cache that this has left
(warm). A run can be stopped and resumed: rows that are in the results file already are not run again, rows of fits
that failed are tried again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python mixtures.py
    python mixtures.py --data DATA --references REFERENCES
    python mixtures.py --targets "two modes" german --methods single auto --data DATA --references REFERENCES
    python mixtures.py --seeds 2 --out small.csv --table small.md
    python mixtures.py --seeds 0
"""

import argparse
import datetime
import sys
import tempfile
import time

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from measure import Array, Estimate
from pages import column_of, measured_on, median, significant, table, write_between_marks
from records import Records, Row
from timed_fit import FIT_FIELDS, refusal, timed_fit

sys.path.append(str(Path(__file__).parents[1]))  # the targets are among the tests

from mixture_targets import TARGETS, Modes, Target, target
from normal_mixtures import POSTERIORS

GERMAN = "german"
SINGLE, AUTO, STUDENT = "single", "auto", "student_t"
#: Fits of each target; a number stands for a mixture of so many components at most.
METHODS = {
    "two modes": (SINGLE, AUTO, "2", STUDENT),
    "ten components": (SINGLE, AUTO, "10", STUDENT),
    "Student-t mixture": (SINGLE, AUTO, "3", STUDENT),
    "banana": (SINGLE, AUTO, "3", STUDENT),
    "funnel": (SINGLE, AUTO, "5", STUDENT),
    "skewed logistic": (SINGLE, AUTO, "3", STUDENT),
    "eight schools": (SINGLE, AUTO, "3"),
    "two normals": (SINGLE, AUTO, "2"),
    "three normals": (SINGLE, AUTO, "6"),
    GERMAN: (SINGLE, "1", "2", "3", "4", "5"),
}
DRAWS = 20_000
#: Of the draws that the ELBO of each run is estimated on; of the exact draws, which all runs share; of k-hat.
FRESH_SEED, EXACT_SEED, KHAT_SEED = 100_000, 500_000, 700_000
#: A mode is found by a component that is so near its centre, in standard deviations of the mode, and has so much of
#: its weight.
NEAR, HEAVY = 1.0, 0.1
KEY = ("target", "method", "seed", "cache")
FIELDS = (
    *KEY, *FIT_FIELDS, "n_components", "elbo", "elbo_se", "reverse_kl", "forward_kl", "forward_kl_se", "n_found",
    "n_modes", "weight_error", "khat", "em", "es", "model_seconds", "process_seconds", "note", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
Fits: `single` is `family="full"`; `auto` and numbers are `family="mixture"` with that `n_components`; `student_t` is
the family of that name. Medians over seeds, with the range; counts are of seeds. ELBO on {DRAWS:,} fresh draws, with
the largest standard error. Reverse KL, KL(q || p), is log evidence - ELBO; forward KL, KL(p || q), is a mean over
{DRAWS:,} draws of p, the same for all fits. A mode is found where a component with at least {HEAVY:g} of its weight has
its mean within {NEAR:g} standard deviation of its centre (Mahalanobis distance in the covariance of the mode). Error of
the weights: of each mode, the part of q's draws that belongs to it, less its true weight; the largest (of a perfect q,
about .003). k-hat can't see a mode in which q has no draws. Seconds are those of the call of `pm.fit` (cold: with an
empty compile cache; warm: in a new process with the cache that the cold run has left); imports and building the model
are not included.
"""

ABOUT_KNOWN = """\
Log evidence and draws are exact. Two Gaussians six standard deviations apart (d = 2); ten Gaussians with centres
uniform in [-5, 5]^20 and covariances of condition up to 100, fits starting from N(0, 10^2); three Student-t with 5
degrees of freedom (d = 2); a banana, x2 ~ N(x1^2 - 1, .5) (d = 2); Neal's funnel (d = 10), whose forward KL has a
standard error that means little, since Gaussian tails are too short for it; a logistic regression on eight
observations.
"""

ABOUT_POSTERIORS = """\
em is the root mean square over unconstrained coordinates of the error of the mean in reference standard deviations, es
that of the relative error of the standard deviation. References: eight schools (centred), given the scale of effects
all is Gaussian, which leaves a sum; mixtures of two and three normals with unknown means, weights and scale, 100,000
weighted draws of one order of the components, repeated in all orders (as many modes); German credit, NUTS.
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
    """Run what is missing; rows that failed are tried again."""
    for name in options.targets:
        n_seeds = options.seeds if name in TARGETS else min(options.seeds, options.posterior_seeds)
        if name == GERMAN and not (options.data and options.references):
            print(f"{name}: skipped, it needs --data and --references", flush=True)
            continue
        for method in METHODS[name]:
            if options.methods is None or method in options.methods:
                run_seeds(records, name, method, n_seeds, options)


def run_seeds(records: Records, name: str, method: str, n_seeds: int, options: argparse.Namespace) -> None:
    """Run the cold fit and the seeds of one method on one target."""
    records.drop(lambda row: not row["seconds"] and (row["target"], row["method"]) == (name, method))
    cells = [(1, "cold"), *((seed, "warm") for seed in range(1, n_seeds + 1))]
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    missing = [cell for cell in cells if (name, method, *map(str, cell)) not in done]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if missing and missing[0][1] == "warm":  # the cache of the cold run is gone
            _run(name, method, 1, Path(folder), options)
        for seed, cache in missing:
            found = _run(name, method, seed, Path(folder), options)
            row = dict(zip(KEY, (name, method, seed, cache), strict=True)) | found
            date = datetime.datetime.now().isoformat(timespec="seconds")
            records.append({**row, "date": date, "environment": describe_environment()})
            print(f"{name} {method} seed {seed} {cache}: {row.get('status')} {row.get('seconds', '')}", flush=True)
            if "seconds" not in found:  # it would end in the same way again
                break


def _run(name: str, method: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    folders = [f"--{key}={value}" for key in ("data", "references") if (value := getattr(options, key))]
    return run_process(script(__file__, *folders, "--cell", name, method, seed), folder, options.limit)


def run_cell(options: argparse.Namespace) -> None:
    """Fit, and report the figures as JSON."""
    name, method, seed = options.cell[0], options.cell[1], int(options.cell[2])
    start = time.perf_counter()
    known = None if name == GERMAN else target(name) if name in TARGETS else POSTERIORS[name]()
    model = known.build() if known else measure.load_models(options.references).german(options.data)
    report(model_seconds=time.perf_counter() - start)
    chosen = fit_options(method) | (known.options if known else {})
    if reason := refusal(model, chosen):
        report(status=f"skipped: {reason}")
        return
    approx, columns = timed_fit(model, chosen, seed)
    report(**columns)
    if approx is None:
        return
    report(n_components=getattr(approx.q, "n_components", 1), khat=approx.khat(random_seed=KHAT_SEED + seed))
    theta = approx.draw_flat(DRAWS, random_seed=FRESH_SEED + seed)
    elbo = Estimate.of(approx.log_p(theta) - approx.log_q(theta))
    report(elbo=elbo.value, elbo_se=elbo.se)
    if known:
        report(**known_figures(approx.q, theta, elbo, known))
        moments = known.mean, known.sd
    else:
        reference = measure.Reference.read(options.references / f"{name}.npz")
        names = measure.coordinate_names(model)
        moments = tuple(np.array([moment[n] for n in names]) for moment in (reference.mean, reference.sd))
    if moments[0] is not None:
        report(em=_rms((approx.mean_flat - moments[0]) / moments[1]), es=_rms(approx.sd_flat / moments[1] - 1.0))


def fit_options(method: str) -> dict[str, Any]:
    """Return the options of ``pm.fit`` for a method."""
    families = {SINGLE: {"family": "full"}, STUDENT: {"family": "student_t"}}
    if method in families:
        return families[method]
    return {"family": "mixture", "n_components": AUTO if method == AUTO else int(method)}


def known_figures(q: Any, theta: Array, elbo: Estimate, known: Target) -> dict[str, object]:
    """Return the columns that compare q, and draws of it, with a density whose evidence and draws are known."""
    exact = known.sample(DRAWS, np.random.default_rng(EXACT_SEED))
    forward = Estimate.of(known.log_density(exact) - q.log_density(exact))
    columns = {"reverse_kl": known.log_z - elbo.value, "forward_kl": forward.value, "forward_kl_se": forward.se}
    if known.modes is None:
        return columns
    weight_error = float(np.abs(known.modes.masses(theta) - known.modes.weights).max())
    counts = {"n_found": n_found(q, known.modes), "n_modes": len(known.modes.weights)}
    return {**columns, **counts, "weight_error": weight_error}


def n_found(q: Any, modes: Modes) -> int:
    """Return how many modes have a component of q."""
    weights = getattr(q, "weights", np.ones(1))
    means = getattr(q, "means", q.mean()[None])
    near = modes.distances(means) <= NEAR
    heavy = weights[:, None] >= HEAVY * modes.weights
    return int((near & heavy).any(axis=0).sum())


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown, one for each target."""
    if not rows:
        return "No results.\n"
    lines = [*measured_on(rows), CAPTION]
    parts = ("Known densities", ABOUT_KNOWN, list(TARGETS)), ("Posteriors", ABOUT_POSTERIORS, [*POSTERIORS, GERMAN])
    for title, about, names in parts:
        if not any(row["target"] in names for row in rows):
            continue
        lines += [f"## {title}", "", about]
        for name in names:
            own = [row for row in rows if row["target"] == name]
            if own:
                lines += [f"### {name[0].upper()}{name[1:]}", "", *_table(own), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    """Return the table of one target; a column that no row has is left out."""
    methods = [m for m in METHODS[rows[0]["target"]] if any(row["method"] == m for row in rows)]
    cells = [_cells([row for row in rows if row["method"] == m]) for m in methods]
    header = [name for name in cells[0] if any(row[name] != "-" for row in cells)]
    return table(header, [[row[name] for name in header] for row in cells])


def _cells(rows: Sequence[Row]) -> dict[str, str]:
    """Return what the table says of one method, by column."""
    warm = [row for row in rows if row["cache"] == "warm" and row["seconds"]]
    of, of_cold = column_of(warm), column_of([row for row in rows if row["cache"] == "cold"])
    elbo = f"{_nats(of('elbo'))} ± {of('elbo_se').max():.3f}" if len(of("elbo")) else "-"
    all_found = int((of("n_found") == of("n_modes")).sum())
    statuses = [row["status"] + (f" ({row['note']})" if row["note"] else "") for row in warm or rows]
    several = len(set(statuses)) > 1
    ended = [f"{status} {n}" if several else status for status, n in Counter(statuses).most_common()]
    return {
        "fit": f"`{rows[0]['method']}`",
        "seeds": str(len(warm)),
        "components": median(of("n_components"), ".0f"),
        "ELBO": elbo,
        "reverse KL": _nats(of("reverse_kl")),
        "forward KL": _nats(of("forward_kl")),
        "modes found": median(of("n_found"), ".0f"),
        "all found": f"{all_found} of {len(warm)}" if len(of("n_found")) else "-",
        "error of weights": median(of("weight_error"), ".3f"),
        "em": median(of("em"), ".3f"),
        "es": median(of("es"), ".3f"),
        "k-hat": median(of("khat"), ".2f"),
        "gap": _nats(of("gap")),
        "gradients": median(of("n_gradients"), ",.0f"),
        "Hessians": median(of("n_hessians"), ",.0f"),
        "cold, s": significant(of_cold("seconds")),
        "warm, s": significant(of("seconds")),
        "ended": ", ".join(ended),
    }


def _nats(values: Array) -> str:
    return median(np.round(values, 3) + 0.0, ",.3f")  # + 0: no -0.000


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--targets", nargs="+", choices=METHODS, default=list(METHODS), metavar="TARGET")
    parser.add_argument("--methods", nargs="+", help="single, auto, student_t, or numbers; default: all of each target")
    parser.add_argument("--seeds", type=int, default=20, help="run the seeds 1 to this; 0: only the tables")
    parser.add_argument("--posterior-seeds", type=int, default=5, help="at most so many for posteriors")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--data", type=Path, help="folder of the data sets, for german")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments, for german")
    parser.add_argument("--out", type=Path, default=folder / "mixtures.csv")
    parser.add_argument("--table", type=Path, default=folder / "mixtures.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=3, metavar=("TARGET", "METHOD", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
