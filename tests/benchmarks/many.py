"""Many fits of one model: beside fits one by one, beside simuk, and beside fits without a part of the data.

Processor seconds on one thread, each measurement in a process of its own: start it with
``OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1``. Warm: without the first three fits of `fit_many`, and after a first fit of
its own for the fits one by one. simuk is measured where it is installed, with ``pm.sample`` as it calls it by default,
on few data sets. A run can be stopped and resumed: what is in the CSV file is not measured again, unless ``--again``
names its part.

Examples
--------
::

    python tests/benchmarks/many.py
    python tests/benchmarks/many.py --again fits calibrate
    python tests/benchmarks/many.py --parts calibrate --fits 1000 --out many.csv --page many.md
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import logging
import time
import warnings

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pymc as pm

from environment import describe_environment
from pages import measured_on, table, write_between_marks
from records import Records, Row

import pymc_ngvi

from pymc_ngvi.core.types import Array

FIELDS = ("part", "what", "n", "seconds_each", "seconds", "said", "date", "environment")
PARTS = ("fits", "models", "calibrate", "leave_out", "update")
N_GROUPS, N_OF_GROUP = 50, 10
RESULTS = Path(__file__).parent / "results"
#: The slope that data are simulated with.
SLOPE = 0.7
#: Data sets that the rivals get: they take longer, and a mean is enough.
N_OF_RIVAL = 10
#: Data sets of each model that are compared with fits alone, behind the first three; draws of each.
N_COMPARED, N_DRAWS = 20, 4_000
#: Parts that are left out by fits, to compare with.
N_LEFT_OUT = 10
SCHOOLS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])

CAPTION = """\
Processor seconds on one thread, each line in a process of its own. "Each" is that of a fit, warm, or of a part that is
left out; "all" has compiling in it. Differences from fits alone are the largest of all variables and data sets, in
standard deviations, and in brackets those of two fits alone with other seeds.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    records.drop(lambda row: row["part"] in options.again)
    done = {(row["part"], row["what"]) for row in records.read()}
    for part in options.parts:
        for what in MEASURED[part]:
            if (part, what) not in done:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # with memory of its own
                    row = pool.submit(measured, part, what, options.fits).result()
                date = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({"part": part, "what": what, **row, "date": date, "environment": describe_environment()})
                print(part, what, row, flush=True)
    write_between_marks(options.page, write_tables(records.read()), Path(__file__).name)


def measured(part: str, what: str, n: int) -> Row:
    """Return one of the measurements."""
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what failed is in the row
        return MEASURED[part][what](n)


# --- models ---


def intercepts() -> tuple[pm.Model, Callable[[int], np.ndarray]]:
    """Return the model, and what simulates its data by a seed."""
    rng = np.random.default_rng(1)
    group, x = np.repeat(np.arange(N_GROUPS), N_OF_GROUP), rng.normal(size=N_GROUPS * N_OF_GROUP)

    def simulated(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        eta = -0.3 + SLOPE * x + rng.normal(0.0, 0.8, N_GROUPS)[group]
        return rng.binomial(1, 1.0 / (1.0 + np.exp(-eta)))

    with pm.Model(coords={"group": np.arange(N_GROUPS)}) as model:
        y = pm.Data("y_data", simulated(0))
        a, b, sd = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2), pm.HalfNormal("sd", 1)
        u = pm.Normal("u", 0, sd, dims="group")
        pm.Bernoulli("y", logit_p=a + b * x + u[group], observed=y)
    return model, simulated


def schools() -> pm.Model:
    """Return eight schools."""
    y, sd = SCHOOLS
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
        theta = pm.Normal("theta", mu, tau, shape=8)
        pm.Normal("y", theta, sd, observed=y)
    return model


type Simulated = tuple[pm.Model, Callable[[int], dict[str, Array]]]


def mixed(*, correlated: bool) -> Simulated:
    """Return a linear mixed model of 18 subjects with 10 rows each, with an intercept and a slope."""
    day, subject = np.tile(np.arange(10.0) / 5.0 - 1.0, 18), np.repeat(np.arange(18), 10)

    def simulated(seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        effect = rng.normal(size=(18, 2)) @ np.linalg.cholesky([[1.0, 0.28], [0.28, 0.49]]).T
        return {"y_data": 0.5 + day + effect[subject, 0] + effect[subject, 1] * day + rng.normal(size=180)}

    with pm.Model() as model:
        y = pm.Data("y_data", simulated(0)["y_data"])
        a, b, sd = pm.Normal("a", 0, 3), pm.Normal("b", 0, 3), pm.HalfNormal("sd", 2)
        if correlated:
            chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(2.0, shape=2))
            effect = pm.MvNormal("effect", np.zeros(2), chol=chol, shape=(18, 2))
        else:
            effect = pm.Normal("effect", 0, pm.HalfNormal("sds", 2, shape=2), shape=(18, 2))
        pm.Normal("y", a + b * day + effect[subject, 0] + effect[subject, 1] * day, sd, observed=y)
    return model, simulated


def herds() -> Simulated:
    """Return a binomial mixed model of 15 herds in 4 periods."""
    herd, period = np.repeat(np.arange(15), 4), np.tile(np.arange(4), 15)
    size = np.random.default_rng(5).integers(5, 30, 60)

    def simulated(seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        eta = np.array([-1.4, -2.4, -2.5, -3.0])[period] + rng.normal(0.0, 0.6, 15)[herd]
        return {"y_data": rng.binomial(size, 1.0 / (1.0 + np.exp(-eta)))}

    with pm.Model() as model:
        y = pm.Data("y_data", simulated(0)["y_data"])
        b, sd = pm.Normal("b", -1, 2, shape=4), pm.HalfNormal("sd", 1)
        u = pm.Normal("u", 0, sd, shape=15)
        pm.Binomial("y", size, logit_p=b[period] + u[herd], observed=y)
    return model, simulated


def logistic() -> Simulated:
    """Return a logistic regression on four predictors."""
    x = np.random.default_rng(2).normal(size=(100, 4))

    def simulated(seed: int) -> dict[str, Array]:
        eta = 0.3 + x @ np.array([0.7, -0.5, 0.2, 0.0])
        return {"y_data": np.random.default_rng(seed).binomial(1, 1.0 / (1.0 + np.exp(-eta)))}

    with pm.Model() as model:
        y = pm.Data("y_data", simulated(0)["y_data"])
        eta = pm.Normal("a", 0, 2) + pm.math.dot(x, pm.Normal("b", 0, 2, shape=4))
        pm.Bernoulli("y", logit_p=eta, observed=y)
    return model, simulated


def process() -> Simulated:
    """Return a Gaussian process at 40 points."""
    apart = np.subtract.outer(*[np.linspace(0.0, 1.0, 40)] * 2) ** 2
    factor = np.linalg.cholesky(np.exp(-0.5 * apart / 0.04) + 1e-6 * np.eye(40))

    def simulated(seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {"y_data": factor @ rng.normal(size=40) + 0.3 * rng.normal(size=40)}

    with pm.Model() as model:
        y = pm.Data("y_data", simulated(0)["y_data"])
        length, size = pm.LogNormal("length", -1.5, 0.5), pm.HalfNormal("size", 1.5)
        cov = size**2 * pm.math.exp(-0.5 * apart / length**2) + 1e-6 * np.eye(40)
        f = pm.MvNormal("f", np.zeros(40), cov=cov)
        pm.Normal("y", f, pm.HalfNormal("sd", 1), observed=y)
    return model, simulated


def schools_simulated() -> Simulated:
    """Return eight schools, and what simulates their data."""

    def simulated(seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {"y": rng.normal(rng.normal(rng.normal(0, 5), 5 * abs(rng.standard_normal()), 8), SCHOOLS[1])}

    return schools(), simulated


def intercepts_simulated() -> Simulated:
    """Return random intercepts in the same form."""
    model, simulated = intercepts()
    return model, lambda seed: {"y_data": simulated(seed)}


# --- what is measured ---


def beside_alone(build: Callable[[], Simulated]) -> Callable[[int], Row]:
    """Return what measures `fit_many`, and how far its figures are from those of fits alone."""

    def measured(n: int) -> Row:
        model, simulated = build()
        each: list[float] = []

        def data() -> "object":
            for seed in range(3 + N_COMPARED):
                each.append(time.process_time())
                yield simulated(seed)
            each.append(time.process_time())

        found = pymc_ngvi.fit_many(model, data(), random_seed=1, draws=N_DRAWS, progressbar=False)
        of_many, of_two, alone, n_alike = [], [], [], 0
        inference, slots = pymc_ngvi.NGVI(found._fitter.asked.slots.model), found._fitter.asked.slots
        for k in range(3, 3 + N_COMPARED):
            slots.put(slots.checked(simulated(k)))
            tables = []
            for seed in (1, 2):
                inference.configure(random_seed=10 * k + seed)
                start = time.process_time()
                approx = inference.fit(progressbar=False)
                alone.append(time.process_time() - start)
                draws = approx.sample(N_DRAWS, chains=1, random_seed=seed).posterior
                tables.append({name: _figures(draws[name].values[0]) for name in draws})
            is_reliable = approx.checks is not None and approx.checks.is_reliable
            n_alike += is_reliable == (found.about("verdict")[k] not in ("not reliable", "not judged"))
            table = {name: found.dataset[name].values[k] for name in tables[0] if name in found.dataset}
            of_many.append(_differences(table, tables[0]))
            of_two.append(_differences(tables[1], tables[0]))
        apart = zip(("means", "sds", "limits"), np.max(of_many, axis=0), np.max(of_two, axis=0), strict=True)
        parts = [
            ", ".join(sorted(set(found.about("posterior").tolist()))),
            f"alone {np.mean(alone[2:]):.3g} s",
            ", ".join(f"{what} within {ours:.2f} ({two:.2f})" for what, ours, two in apart),
            f"{n_alike} of {N_COMPARED} verdicts alike",
        ]
        return _row(N_COMPARED, float(np.mean(np.diff(each)[3:])), each[-1] - each[0], "; ".join(parts))

    return measured


def _figures(draws: Array) -> Array:
    """Return means, standard deviations and limits, as a table of many fits has them."""
    return np.stack([draws.mean(axis=0), draws.std(axis=0), *np.quantile(draws, [0.03, 0.97], axis=0)])


def _differences(ours: dict[str, Array], theirs: dict[str, Array]) -> list[float]:
    """Return the largest differences of means, of standard deviations and of limits, in standard deviations."""
    found = []
    for name, values in ours.items():
        sd = np.where(theirs[name][1] > 0.0, theirs[name][1], np.inf)
        apart = np.abs(values - theirs[name]) / sd
        found.append([apart[0].max(), apart[1].max(), apart[2:].max()])
    return np.max(found, axis=0).tolist()


def many(posterior: str) -> Callable[[int], Row]:
    """Return what measures `fit_many`."""

    def measured(n: int) -> Row:
        model, simulated = intercepts()
        each: list[float] = []

        def data() -> "object":
            for seed in range(n):
                each.append(time.process_time())
                yield {"y_data": simulated(seed)}
            each.append(time.process_time())

        found = pymc_ngvi.fit_many(model, data(), posterior=posterior, random_seed=1, progressbar=False)
        slope = found.dataset.b
        hold = (slope.sel(statistic="lower") < SLOPE) & (slope.sel(statistic="upper") > SLOPE)
        said = f"{found}; 94 % intervals hold the slope in {100 * float(hold.mean()):.1f} % of the fits"
        return _row(n, float(np.mean(np.diff(each)[3:])), each[-1] - each[0], said)

    return measured


def one_by_one(posterior: str) -> Callable[[int], Row]:
    """Return what measures fits one after the other, by one `NGVI`."""

    def measured(n: int) -> Row:
        model, simulated = intercepts()
        inference = pymc_ngvi.NGVI(model, posterior=posterior, random_seed=1)
        each = []
        for seed in range(N_OF_RIVAL):
            pm.set_data({"y_data": simulated(seed)}, model=model)
            start = time.process_time()
            inference.fit(progressbar=False)
            each.append(time.process_time() - start)
        return _row(N_OF_RIVAL, float(np.mean(each[1:])), sum(each), "")

    return measured


def calibrated(n: int) -> Row:
    """Measure `calibrate`."""
    start = time.process_time()
    found = pymc_ngvi.calibrate(schools(), n, random_seed=1, progressbar=False)
    seconds = time.process_time() - start
    return _row(n, seconds / n, seconds, found.sentence)


def by_simuk(n: int) -> Row:
    """Measure simuk, with the sampler and the draws that it takes by default."""
    if importlib.util.find_spec("simuk") is None:
        return _row(0, float("nan"), float("nan"), "simuk is not installed")
    from simuk import SBC

    start = time.process_time()
    sbc = SBC(schools(), num_simulations=N_OF_RIVAL, sample_kwargs={"progressbar": False, "cores": 1}, seed=1)
    sbc.run_simulations()
    seconds = time.process_time() - start
    said = f"simuk {importlib.metadata.version('simuk')}, pm.sample: 4 chains, 1,000 draws each"
    return _row(N_OF_RIVAL, seconds / N_OF_RIVAL, seconds, said)


def left_out(**how: object) -> Callable[[int], Row]:
    """Return what measures `leave_out`, beside fits without some of the parts."""

    def measured(n: int) -> Row:
        model, _ = intercepts()
        approx = pymc_ngvi.fit_ngvi(model, random_seed=1, progressbar=False)
        start = time.process_time()
        found = approx.leave_out(random_seed=1, **how)
        seconds = time.process_time() - start
        return _row(found.n_data_points, seconds / found.n_data_points, seconds, _beside_fits(approx, found, how))

    return measured


def _beside_fits(approx: pymc_ngvi.NGVIApproximation, found: object, how: dict) -> str:
    """Say how far some of the scores are from those of fits without the part."""
    from pymc_ngvi.density.observed_rows import MaskedDensity, ObservedLogp

    size = N_OF_GROUP if how else 1
    logp, apart = ObservedLogp(approx.density, "y"), []
    masked = MaskedDensity(approx.density, logp)
    inference = pymc_ngvi.NGVI(approx.model, posterior="exact", random_seed=2)
    inference._density = masked.density
    start = time.process_time()
    for part in range(N_LEFT_OUT):
        rows = np.arange(part * size, (part + 1) * size)
        masked.leave_out(rows)
        theta = inference.fit(progressbar=False)._posterior.distribution.draw(20_000, np.random.default_rng(3))
        of_draws = logp(theta)[:, rows].sum(axis=1)
        apart.append(np.log(np.mean(np.exp(of_draws))) - float(found.elpd_i[part]))
    seconds = (time.process_time() - start) / N_LEFT_OUT
    return f"{np.abs(apart).max():.3f} nats at most from fits without a part, of {seconds:.1f} s each"


def updated(n_groups: int, n_of_group: int, *, new_groups: int = 0) -> Callable[[int], Row]:
    """Return what measures `update` with 1 % new rows, beside a fit of all of them."""

    def measured(n: int) -> Row:
        rng = np.random.default_rng(1)
        n_rows = n_groups * n_of_group
        effect, n_new = rng.normal(0.0, 0.8, n_groups + new_groups), n_rows // 100
        group = np.concatenate([np.repeat(np.arange(n_groups), n_of_group), rng.integers(len(effect), size=n_new)])
        x = rng.normal(size=n_rows + n_new)
        y = rng.binomial(1, 1.0 / (1.0 + np.exp(0.3 - SLOPE * x - effect[group])))
        old, new = slice(n_rows), slice(n_rows, None)
        approx = pymc_ngvi.fit_ngvi(_with_data(x[old], group[old], y[old], n_groups), random_seed=1, progressbar=False)
        labels = range(len(effect))
        start = time.process_time()
        found = approx.update({"x": x[new], "group_of": group[new], "y": y[new], "group": labels}, random_seed=1)
        seconds = time.process_time() - start
        start = time.process_time()
        again = pymc_ngvi.fit_ngvi(_with_data(x, group, y, len(effect)), random_seed=2, progressbar=False)
        of_fit = time.process_time() - start
        return _row(n_new, seconds / n_new, seconds, f"a fit {of_fit:.1f} s; {_apart(found, again)}; {found!r}")

    return measured


def _with_data(x: np.ndarray, group: np.ndarray, y: np.ndarray, n_groups: int) -> pm.Model:
    with pm.Model(coords={"group": range(n_groups)}) as model:
        predictor, index = pm.Data("x", x), pm.Data("group_of", group)
        a, b, sd = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2), pm.HalfNormal("sd", 1)
        u = pm.Normal("u", 0, sd, dims="group")
        pm.Bernoulli("y", logit_p=a + b * predictor + u[index], observed=y)
    return model


def _apart(found: object, again: pymc_ngvi.NGVIApproximation) -> str:
    """Return the largest difference of means and of standard deviations, in those of a fit."""
    ours, theirs = (of.sample(8_000, random_seed=3).posterior for of in (found, again))
    means, sds = [], []
    for name in ("a", "b", "sd", "u"):
        sd = theirs[name].std(("chain", "draw"))
        means.append(float((abs(ours[name].mean(("chain", "draw")) - theirs[name].mean(("chain", "draw"))) / sd).max()))
        sds.append(float(abs(ours[name].std(("chain", "draw")) / sd - 1.0).max()))
    return f"means within {max(means):.3f} sd of it, sds within {100 * max(sds):.0f} %"


MEASURED: dict[str, dict[str, Callable[[int], Row]]] = {
    "fits": {
        "fit_many, gaussian": many("gaussian"),
        "one by one, gaussian": one_by_one("gaussian"),
        "fit_many, exact": many("exact"),
        "one by one, exact": one_by_one("exact"),
    },
    "models": {
        "random intercepts, logistic": beside_alone(intercepts_simulated),
        "linear mixed, slopes": beside_alone(lambda: mixed(correlated=False)),
        "linear mixed, correlated slopes": beside_alone(lambda: mixed(correlated=True)),
        "binomial mixed": beside_alone(herds),
        "eight schools": beside_alone(schools_simulated),
        "logistic regression": beside_alone(logistic),
        "Gaussian process, 40 points": beside_alone(process),
    },
    "calibrate": {"calibrate": calibrated, "simuk": by_simuk},
    "leave_out": {"rows": left_out(), "groups": left_out(groups="group")},
    "update": {
        "500 rows, 50 groups": updated(50, 10),
        "20,000 rows, 1,000 groups": updated(1_000, 20),
        "20,000 rows, 1,000 groups, five new": updated(1_000, 20, new_groups=5),
        "100,000 rows, 2,000 groups": updated(2_000, 50),
    },
}


def _row(n: int, each: float, seconds: float, said: str) -> Row:
    return {"n": n, "seconds_each": each, "seconds": seconds, "said": said}


# --- the table ---


def write_tables(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    lines = [CAPTION, *measured_on(rows)]
    order = [(part, what) for part, found in MEASURED.items() for what in found]
    cells = [
        [
            f"{row['part']}: {row['what']}",
            row["n"],
            f"{float(row['seconds_each']):.3g}",
            f"{float(row['seconds']):,.0f}",
            row["said"],
        ]
        for row in sorted(rows, key=lambda row: order.index((row["part"], row["what"])))
    ]
    return "\n".join([*lines, *table(("", "n", "each, s", "all, s", ""), cells)]) + "\n"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--fits", type=int, default=200, help="data sets")
    parser.add_argument("--again", nargs="+", default=(), choices=PARTS, help="measure these once more")
    parser.add_argument("--out", type=Path, default=RESULTS / "many.csv", help="rows, one for each measurement")
    parser.add_argument("--page", type=Path, default=RESULTS / "many.md", help="page with marks, or a new file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
