"""What README.md claims: seconds, kinds of posterior and errors of the default fit, by kind of model, beside NUTS.

Each data set has a process of its own: a first fit, a second one with another seed, and NUTS (nutpie, four chains of
1,000 draws after 1,000 for tuning; errors are those beside a longer run). Functions of the packages are compiled
before, but for rows with an empty cache, which are what the very first fit after an installation takes. Seconds are
those of processors, so that others on the machine count little; NUTS samples on two cores, and half of its sampling
counts. A run can be stopped and resumed.

Examples
--------
::

    python readme.py --python ENVIRONMENT/bin/python  # which has nutpie and pymc-marketing
    python readme.py --tables
"""

import argparse
import runpy
import sys
import tempfile

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import exact_models as large
import models_glmm
import numpy as np
import pandas as pd
import pymc as pm

from environment import today_and_here
from isolated import first_line, report, run_process
from measure import Reference, coordinate_names
from pages import measured_on, table, write_between_marks
from posteriors_models import correlated, crossed, growth, linear, slopes
from records import Records, Row
from rows_models import Design, logistic
from users import MODELS as USERS
from users import _processor_seconds as processor_seconds

ROOT = Path(__file__).parents[2]
DATA, RESULTS = ROOT / "examples" / "data", Path(__file__).parent / "results"
FIELDS = (
    "kind", "model", "cache", "status", "n_dim", "first", "first_wall", "second", "posterior", "verdict", "em", "es",
    "worst_mean", "worst_sd", "nuts_compile", "nuts_sample", "nuts_ess", "nuts_rhat", "load", "date", "environment",
)  # fmt: skip
LIMIT = 600.0


def heart() -> pm.Model:
    """Return the logistic regression of heart disease on 18 predictors."""
    frame = pd.read_csv(DATA / "heart.csv")
    y = frame.pop("y").to_numpy()
    return logistic(Design(np.column_stack([np.ones(len(y)), frame.to_numpy(dtype=float)]), y, 2.5))


def epilepsy() -> pm.Model:
    """Return the model of `examples/epilepsy.py`."""
    build = runpy.run_path(str(ROOT / "examples" / "epilepsy.py"))["build_model"]
    return build(pd.read_csv(DATA / "epilepsy.csv"))


def toenail() -> pm.Model:
    """Return the logistic regression with an intercept for each patient."""
    return models_glmm.random_intercept_logistic(models_glmm.toenail_data(models_glmm.read("toenail", DATA)))


def marketing(seed: int) -> pm.Model:
    """Return pymc-marketing's mix model of 104 weeks, four channels and two controls: 16 parameters."""
    from pymc_marketing.mmm import MMM, GeometricAdstock, LogisticSaturation

    rng, channels, controls = np.random.default_rng(seed), ["tv", "radio", "search", "social"], ["price", "event"]
    spend = rng.gamma(2.0, 1.0, (104, 4)) * (rng.random((104, 4)) < [1.0, 0.7, 1.0, 0.5])
    carry = rng.uniform(0.1, 0.7, 4) ** np.arange(8)[:, None]
    carried = [np.convolve(s, c / c.sum())[:104] / s.max() for s, c in zip(spend.T, carry.T, strict=True)]
    of_controls = rng.normal(size=(104, 2))
    sales = 3.0 + np.tanh(rng.uniform(0.7, 2.0, 4) * np.transpose(carried)) @ rng.uniform(0.5, 2.0, 4)
    sales += of_controls @ [0.3, -0.2] + rng.normal(0.0, 0.2, 104)
    frame = pd.DataFrame(np.column_stack([spend, of_controls]), columns=channels + controls)
    frame.insert(0, "date", pd.date_range("2022-01-03", periods=104, freq="W-MON"))
    mix = MMM(
        date_column="date",
        channel_columns=channels,
        control_columns=controls,
        adstock=GeometricAdstock(l_max=8),
        saturation=LogisticSaturation(),
    )
    mix.build_model(frame, pd.Series(sales, name="y"))
    return mix.model


def of_users(*names: str) -> dict[str, Callable[[], pm.Model]]:
    """Return models of `users.py`."""
    return {name: USERS[name][1] for name in names}


#: By kind, as README calls it: name -> function that makes the model.
KINDS = {
    "regression (GLM)": {
        "heart": heart, "logistic, 40 coefficients": large.dense_regression,
        **of_users(
            "regression: earnings on height", "regression: house prices", "regression: logistic rare",
            "regression: ordered logit", "counts and survival: negative binomial",
        ),
    },
    "random intercepts": {
        "toenail": toenail,
        **of_users(
            "groups: bambi intercepts", "groups: bambi bernoulli", "groups: bambi negative binomial", "groups: radon",
            "groups: rasch", "groups: centred many zeros",
        ),
    },
    "several effects in each group": {
        "epilepsy": epilepsy, "binary, 60 groups": slopes, "linear, 85 groups": linear, "reaction times": growth,
        "counts, 3 effects": partial(correlated, 3), "counts, 5 effects": partial(correlated, 5),
        **of_users("groups: bambi slopes", "groups: lkj slopes"),
    },
    "crossed or nested groups": {
        "316 persons, 24 items": crossed, "200 persons, 150 items": large.crossed,
        **of_users("groups: bambi poisson crossed", "groups: bambi nested", "groups: two parameter items"),
    },
    "Gaussian process, spline, time series, map": {
        "random walk of 300": large.long_walk,
        **of_users(
            "series and fields: local level", "series and fields: stochastic volatility",
            "series and fields: intrinsic car", "series and fields: latent process",
            "series and fields: basis process", "series and fields: spline",
        ),
    },
    "survival, hurdle, zero-inflated counts": of_users(
        "counts and survival: weibull censored", "counts and survival: frailty", "counts and survival: zero inflated",
        "counts and survival: hurdle", "counts and survival: occupancy", "counts and survival: beta binomial",
    ),
    "pymc-marketing mix, 16 parameters": {f"seed {seed}": partial(marketing, seed) for seed in range(1, 7)},
}  # fmt: skip
CAPTION = """\
The default fit; seconds are those of processors, with the range over data sets. First: the first fit in a process;
second: another one of the same model. NUTS: compiling, and half of the sampling of four chains. Errors are those of
unconstrained coordinates, root mean squares in standard deviations, beside a longer run of NUTS, whose least effective
sample size and largest R-hat are in the file.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables; or, as a process of such a run, one data set."""
    options = _parse_options(arguments)
    if options.worker:
        measure(*options.worker)
        return
    records = Records(options.out, FIELDS)
    done = {(row["kind"], row["model"], row["cache"]) for row in records.read()}
    cells = [(kind, model, "filled") for kind in KINDS for model in KINDS[kind]]
    cells += [(kind, next(iter(KINDS[kind])), "empty") for kind in KINDS]
    compiled = set()
    with tempfile.TemporaryDirectory() as folder:
        for i, cell in enumerate([] if options.tables else cells):
            if cell in done or cell[0] not in options.kinds:
                continue
            command = [options.python, __file__, "--worker", *cell]
            if cell[2] == "filled" and cell[0] not in compiled:
                run_process([*command[:-1], "empty"], Path(folder) / "filled", LIMIT)  # is not counted
                compiled.add(cell[0])
            found = run_process(command, Path(folder) / ("filled" if cell[2] == "filled" else str(i)), LIMIT)
            records.append(dict(zip(FIELDS, cell, strict=False)) | today_and_here() | found)
            print(*cell, found, flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def measure(kind: str, name: str, cache: str) -> None:
    """Fit a model twice and sample it, and print the columns of its row as they are known."""
    import os
    import time
    import warnings

    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    warnings.simplefilter("ignore")  # the verdict is in the row
    model = KINDS[kind][name]()
    start, wall = processor_seconds(), time.perf_counter()
    try:
        approx = pm.fit(method="ngvi", model=model, random_seed=1, progressbar=False)
    except Exception as error:
        report(status=first_line(error))
        return
    middle, load = processor_seconds(), os.getloadavg()[0]
    report(status="fitted", first=middle - start, first_wall=time.perf_counter() - wall, load=load)
    posterior = "nested" if approx.is_nested else "exact" if approx.is_exact else "Gaussian or moved"
    report(n_dim=approx.layout.n_dim, posterior=posterior, verdict=approx.checks.word)
    if cache == "empty":
        return
    middle = processor_seconds()
    pm.fit(method="ngvi", model=model, random_seed=2, progressbar=False)
    report(second=processor_seconds() - middle)
    names, reference = coordinate_names(model), by_nuts(model)
    ratios = approx.sd_flat / np.array([reference.sd[one] for one in names]) - 1.0
    errors = reference.errors(names, approx.mean_flat, approx.sd_flat)
    report(em=errors.em, es=errors.es, worst_mean=errors.worst_error, worst_sd=float(ratios[abs(ratios).argmax()]))


def by_nuts(model: pm.Model) -> Reference:
    """Sample, print the columns of NUTS, and return the moments of a second and longer run."""
    import arviz_stats
    import nutpie

    start = processor_seconds()
    compiled = nutpie.compile_pymc_model(model)
    middle = processor_seconds()
    options = {"chains": 4, "cores": 2, "tune": 1_000, "progress_bar": False}
    nutpie.sample(compiled, draws=1_000, seed=1, **options)
    report(nuts_compile=middle - start, nuts_sample=processor_seconds() - middle)
    tree = nutpie.sample(compiled, draws=4_000, seed=2, target_accept=0.95, store_unconstrained=True, **options)
    free = tree.posterior.to_dataset()[[rv.name for rv in model.free_RVs]]
    ess, rhat = (of(free).data_vars.values() for of in (arviz_stats.ess, arviz_stats.rhat))
    report(nuts_ess=min(float(v.min()) for v in ess), nuts_rhat=max(float(v.max()) for v in rhat))
    theta, names = np.concatenate(tree.sample_stats["unconstrained_draw"].to_numpy()), coordinate_names(model)
    mean, sd = (dict(zip(names, moment.tolist(), strict=True)) for moment in (theta.mean(axis=0), theta.std(axis=0)))
    return Reference(mean, sd)


def write_table(rows: Sequence[Row]) -> str:
    """Return the table of kinds, as in README.md, and that of data sets."""
    warm = [row for row in rows if row["cache"] == "filled"]
    header = (
        "model",
        "data set",
        "d",
        "first, s",
        "second, s",
        "NUTS, s",
        "posterior",
        "verdict",
        "em",
        "es",
        "worst mean",
    )
    cells = [
        (row["kind"], row["model"], row["n_dim"], *(spread([value]) for value in seconds_of(row)), row["posterior"],
         row["verdict"] or row["status"], *(row[name][:5] for name in ("em", "es", "worst_mean")))
        for row in warm
    ]  # fmt: skip
    return "\n".join(
        [*measured_on(rows), CAPTION, *by_kind(rows), "", after_installation(rows), "", *table(header, cells), ""]
    )


def by_kind(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table of README.md."""
    header = ("model", "data sets", "parameters", "first fit, s", "another, s", "NUTS, s", "exact", "error of a mean")
    cells = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind and row["cache"] == "filled"]
        exact = [row for row in own if row["verdict"].startswith("exact")]
        errors = [float(row["em"]) for row in exact if row["em"]]
        sizes = spread([float(row["n_dim"]) for row in own if row["n_dim"]], least=0.0)
        seconds = [spread([v for v in values if v]) for values in zip(*map(seconds_of, own), strict=True)]
        error = f"{max(errors, default=np.nan):.2f}"
        cells.append((kind, len(own), sizes, *seconds, f"{len(exact)} of {len(own)}", error))
    return table(header, cells)


def after_installation(rows: Sequence[Row]) -> str:
    """Return the sentence of README.md on fits with an empty cache, beside those of the same models."""
    cold, warm = (
        {row["model"]: float(row["first"]) for row in rows if row["cache"] == cache} for cache in ("empty", "filled")
    )
    more = max((cold[model] - warm[model] for model in cold), default=np.nan)
    return f"The very first fit after an installation takes up to {more:.0f} seconds more."


def seconds_of(row: Row) -> tuple[float, ...]:
    """Return those of the first fit, of the second and of NUTS; 0 where they are not known."""
    first, second, compiled, sampled = (float(row[name] or 0.0) for name in ("first", "second", *FIELDS[14:16]))
    return first, second, compiled + 0.5 * sampled


def spread(values: Sequence[float], least: float = 9.5) -> str:
    """Return the smallest and the largest of some values, with a decimal below a least one."""
    ends = [f"{v:.0f}" if v >= least else f"{v:.1f}" for v in (min(values, default=0.0), max(values, default=0.0))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--python", default=sys.executable, help="what runs the fits")
    parser.add_argument("--out", type=Path, default=RESULTS / "readme.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "readme.md")
    parser.add_argument("--tables", action="store_true", help="write the tables anew, and measure nothing")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
