"""Nutpie on the model in whitened coordinates beside nutpie as it is: effective draws a second and a gradient.

Each run is a process of its own: first with an empty compile cache (cold), then with the cache that this has left
(warm). A run can be stopped and resumed: rows that are in the results file already are not run again. From a checkout
that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python whitened.py
    python whitened.py --models logistic walk --seeds 1
    python whitened.py --seeds 0
"""

import argparse
import tempfile
import time
import warnings

from collections.abc import Callable, Sequence
from pathlib import Path

import functionals_groups
import numpy as np
import pymc as pm

from environment import today_and_here
from isolated import report, run_process, script
from pages import column_of, measured_on, median, significant, table, write_between_marks
from records import Records, Row

import pymc_ngvi

CHAINS, DRAWS = 4, 500
#: Tuning draws: of nutpie, its own defaults.
TUNE = {"nutpie": 400, "nutpie, low rank": 800, "whitened": 100}
KEY = ("model", "method", "seed", "cache")
FIELDS = (
    *KEY, "n_dim", "family", "rhat", "ess", "gradients", "tuning_gradients", "divergences", "fit_seconds",
    "compile_seconds", "sample_seconds", "unwhiten_seconds", "status", "note", "process_seconds", "date", "environment",
)  # fmt: skip
#: Seconds after which a run is ended.
LIMIT = 600

CAPTION = f"""\
{CHAINS} chains of {DRAWS} draws, one after the other. `nutpie`: as `pm.sample` runs it; `low rank`: with
its low-rank mass matrix, each with its own number of tuning draws; `whitened`: the model of `approx.whitened()`, with
{TUNE["whitened"]} tuning draws. q is the Gaussian fit (`posterior="gaussian"`). ESS: the smallest bulk effective sample
size of free variables and Deterministics. For 1,000 gradients: those of the draws alone, and those of tuning, too.
Seconds are of the processor: those of fit, compilation, sampling and mapping back together (warm: in a new process with
a filled compile cache; cold: with an empty one). Other processes ran on the machine at the same time. Medians over
seeds, with the range.
"""


def logistic() -> pm.Model:
    """Return a regression with 40 predictors and 30 events in 300 rows."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 40)) @ (np.eye(40) + 0.3 * rng.normal(size=(40, 40)) / np.sqrt(40))
    y = np.zeros(300)
    y[np.argsort(x[:, :4].sum(axis=1) + rng.logistic(size=300))[-30:]] = 1.0
    with pm.Model() as model:
        intercept, beta = pm.Normal("intercept", 0, 5), pm.Normal("beta", 0, 2.5, shape=40)
        pm.Bernoulli("y", logit_p=intercept + x @ beta, observed=y)
    return model


def polynomial() -> pm.Model:
    """Return a regression on the powers of a number, which are nearly collinear; 60 rows."""
    rng = np.random.default_rng(2)
    x = rng.uniform(0.5, 2.0, 60)
    powers = x[:, None] ** np.arange(6)
    y = np.sin(2.0 * x) + rng.normal(0, 0.2, 60)
    with pm.Model() as model:
        beta, sigma = pm.Normal("beta", 0, 10, shape=6), pm.HalfNormal("sigma", 1)
        mean = pm.Deterministic("mean", powers @ beta)
        pm.Normal("y", mean, sigma, observed=y)
    return model


def gaussian_process() -> pm.Model:
    """Return counts at 30 places whose log rate is a Gaussian process with an unknown length and size."""
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0, 10, 30))
    y = rng.poisson(np.exp(1.0 + np.sin(x)))
    with pm.Model() as model:
        ell, eta = pm.InverseGamma("ell", 5, 6), pm.HalfNormal("eta", 1)
        level = pm.Normal("level", 0, 2)
        process = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(1, ls=ell))
        f = process.prior("f", x[:, None])
        pm.Poisson("y", pm.math.exp(level + f), observed=y)
    return model


def walk() -> pm.Model:
    """Return counts of 400 days whose log rate is a random walk."""
    rng = np.random.default_rng(4)
    y = rng.poisson(np.exp(1.0 + np.cumsum(rng.normal(0, 0.1, 400))))
    with pm.Model() as model:
        step, start = pm.HalfNormal("step", 0.3), pm.Normal("start", 0, 2)
        walk = pm.GaussianRandomWalk("walk", 0, step, init_dist=pm.Normal.dist(0, 0.1), shape=400)
        pm.Poisson("y", pm.math.exp(start + walk), observed=y)
    return model


MODELS: dict[str, tuple[str, Callable[[], pm.Model]]] = {
    "glmm": ("counts, correlated intercepts and slopes, centred", lambda: functionals_groups.slopes(centred=True)),
    "crossed": ("crossed effects, centred", lambda: functionals_groups.crossed(centred=True, level=1.0)),
    "logistic": ("logistic, 40 predictors and 30 events", logistic),
    "polynomial": ("powers of a number, nearly collinear", polynomial),
    "gp": ("Gaussian process for the log rate of counts", gaussian_process),
    "walk": ("random walk for the log rate of counts", walk),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table; or, as a process of such a run, one measurement."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(*options.cell)
        return
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read() if row["ess"]}
    records.drop(lambda row: not row["ess"])
    for model in options.models:
        for method in options.methods:
            keys = [(model, method, "1", "cold"), *((model, method, str(s + 1), "warm") for s in range(options.seeds))]
            missing = [key for key in keys if key not in done]
            if not options.seeds or not missing:
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                cold = _run(keys[0], Path(folder))  # for its cache, too
                for key in missing:
                    found = cold if key[-1] == "cold" else _run(key, Path(folder))
                    records.append(dict(zip(KEY, key, strict=True)) | found | today_and_here())
                    print(*key, found.get("ess"), found.get("sample_seconds"), found.get("status", ""), flush=True)
    write_between_marks(options.table, write_table(records.read()), Path(__file__).name)


def _run(key: tuple[str, ...], folder: Path) -> dict[str, object]:
    return run_process(script(__file__, "--cell", *key[:3]), folder, LIMIT)


def run_cell(name: str, method: str, seed: str) -> None:
    """Sample, and report the figures as JSON."""
    import arviz_stats
    import nutpie

    model, clock, white = MODELS[name][1](), _Clock(), None
    target, arguments, how = model, {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method == "whitened":
            with model:
                approx = pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=int(seed), progressbar=False)
            white = approx.whitened()
            target, arguments = white.model, white.nutpie_kwargs()
            report(fit_seconds=clock(), family=approx.record.family)
        elif method == "nutpie, low rank":
            how = {"adaptation": "low_rank"}
        compiled = nutpie.compile_pymc_model(target, **arguments)
        report(compile_seconds=clock(), n_dim=int(compiled.n_dim))
        tree = nutpie.sample(
            compiled, draws=DRAWS, tune=TUNE[method], chains=CHAINS, cores=1, seed=int(seed), progress_bar=False, **how
        )
        report(sample_seconds=clock())
        stats, warmup = tree["sample_stats"], tree["warmup_sample_stats"]
        if white is not None:
            tree = white.unwhiten(tree)
            report(unwhiten_seconds=clock())
    posterior = tree["posterior"].to_dataset()
    posterior = posterior[[v.name for v in (*model.free_RVs, *model.deterministics)]]
    report(
        rhat=max(float(value.max()) for value in arviz_stats.rhat(posterior).data_vars.values()),
        ess=min(float(value.min()) for value in arviz_stats.ess(posterior).data_vars.values()),
        gradients=int(stats["n_steps"].sum()),
        tuning_gradients=int(warmup["n_steps"].sum()),
        divergences=int(stats["diverging"].sum()),
    )


class _Clock:
    """Seconds of the processor since it was asked last."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def __call__(self) -> float:
        last, self._last = self._last, time.process_time()
        return self._last - last


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    rows = [row for row in rows if row["ess"]]
    if not rows:
        return "No results.\n"
    cells = [
        _cells(title, [row for row in rows if (row["model"], row["method"]) == (name, method)])
        for name, (title, _) in MODELS.items()
        for method in TUNE
        if any((row["model"], row["method"]) == (name, method) for row in rows)
    ]
    return "\n".join([*measured_on(rows), CAPTION, *table(list(cells[0]), [list(c.values()) for c in cells]), ""])


def _cells(title: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return what the table says of one method, by column."""
    warm, cold = ([row for row in rows if row["cache"] == cache] for cache in ("warm", "cold"))
    of = column_of(warm)
    draws, all_gradients = of("gradients"), of("gradients") + of("tuning_gradients")
    n_dim, family = rows[0]["n_dim"], rows[0]["family"]
    return {
        "model": f"{title} (d = {n_dim})",
        "method": f"`{rows[0]['method']}`" + (f", {family}" if family else ""),
        "R-hat": median(of("rhat"), ".3f"),
        "ESS": median(of("ess"), ",.0f"),
        "divergences": median(of("divergences"), ",.0f"),
        "for 1,000 gradients": significant(1_000 * of("ess") / draws),
        "tuning, too": significant(1_000 * of("ess") / all_gradients),
        "sampling, s": significant(of("sample_seconds")),
        "ESS a second of sampling": significant(of("ess") / of("sample_seconds")),
        "warm, s": significant(_seconds(warm)),
        "ESS a second, warm": _a_second(warm),
        "cold, s": significant(_seconds(cold)),
        "ESS a second, cold": _a_second(cold),
    }


def _seconds(rows: Sequence[Row]) -> np.ndarray:
    names = ("fit_seconds", "compile_seconds", "sample_seconds", "unwhiten_seconds")
    return np.array([sum(float(row[name] or 0.0) for name in names) for row in rows])


def _a_second(rows: Sequence[Row]) -> str:
    return significant(column_of(rows)("ess") / _seconds(rows)) if rows else "-"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    docs = Path(__file__).parents[2] / "docs" / "benchmarks"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=TUNE, default=list(TUNE))
    parser.add_argument("--seeds", type=int, default=2, help="warm runs; 0 writes the table alone")
    parser.add_argument("--out", type=Path, default=docs / "whitened.csv")
    parser.add_argument("--table", type=Path, default=docs / "whitened.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seeds < 0:
        parser.error("--seeds should be at least 0")
    return options


if __name__ == "__main__":
    main()
