"""Precisions of any shape: crossed effects beside lme4 and glmmTMB, maps, and long chains.

Each fit runs in a process of its own with an empty compile folder: seconds are those of the first fit, without imports
and building the model. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python sparse_models.py --data DATA
    python sparse_models.py --models "map of 30 x 30" --table few.md
"""

import argparse
import functools
import tempfile
import time

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

from environment import today_and_here
from isolated import peak_memory, report, run_process, script
from pages import measured_on, table, write_between_marks
from scipy.spatial import Delaunay

R_SCRIPT = Path(__file__).with_name("crossed.R")
#: Of the prior of a map: the precision of the difference of two neighbours.
PRECISION = 4.0
#: Draws of q for the standard deviations of scales.
N_DRAWS = 2_000


def ratings(data: Path, *, binary: bool) -> pd.DataFrame:
    """Return lme4's InstEval: ratings y of lecturers d by students s; or whether they are 4 or 5."""
    frame = pd.read_csv(data / "insteval.csv.gz")[["y", "s", "d"]]
    return frame.assign(y=(frame["y"] >= 4).astype(int)) if binary else frame


def crossed(frame: pd.DataFrame, *, binary: bool) -> pm.Model:
    """Return a model with an effect of each student and each lecturer."""
    student, lecturer = (pd.factorize(frame[name])[0] for name in ("s", "d"))
    with pm.Model() as model:
        level = pm.Normal("level", 0.0, 5.0)
        sd_s, sd_d = pm.HalfNormal("sd_s", 1.0), pm.HalfNormal("sd_d", 1.0)
        s = pm.Normal("s", 0.0, sd_s, shape=int(student.max()) + 1)
        d = pm.Normal("d", 0.0, sd_d, shape=int(lecturer.max()) + 1)
        eta = level + s[student] + d[lecturer]
        if binary:
            pm.Bernoulli("y", logit_p=eta, observed=frame["y"].to_numpy())
        else:
            pm.Normal("y", eta, pm.HalfNormal("noise", 2.0), observed=frame["y"].to_numpy(dtype=float))
    return model


def _edges(side: int) -> np.ndarray:
    place = np.arange(side * side).reshape(side, side)
    across, down = (place[:, :-1], place[:, 1:]), (place[:-1], place[1:])
    return np.concatenate([np.column_stack([a.ravel(), b.ravel()]) for a, b in (across, down)])


def map_of(side: int) -> pm.Model:
    """Return counts on a lattice whose log rates have an intrinsic prior, written by its edges."""
    edges = _edges(side)
    counts = np.random.default_rng(0).poisson(np.exp(0.5 * np.sin(np.arange(side * side) / side / 5)))
    with pm.Model() as model:
        rate = pm.Flat("rate", shape=side * side, initval=np.zeros(side * side))
        pm.Potential("smooth", -0.5 * PRECISION * pt.sum((rate[edges[:, 0]] - rate[edges[:, 1]]) ** 2))
        pm.Poisson("y", pt.exp(rate), observed=counts)
    return model


def icar(side: int) -> pm.Model:
    """Return the same with `pm.ICAR`, whose effects sum to zero."""
    edges, n = _edges(side), side * side
    adjacent = np.zeros((n, n), dtype=int)
    adjacent[edges[:, 0], edges[:, 1]] = adjacent[edges[:, 1], edges[:, 0]] = 1
    with pm.Model() as model:
        rate = pm.Normal("level") + pm.ICAR("effect", W=adjacent, sigma=0.5)
        pm.Poisson("y", pt.exp(rate), observed=np.random.default_rng(0).poisson(2.0, n))
    return model


def regions(n: int) -> pm.Model:
    """Return counts in regions of a random map with a structured and an unstructured effect, by `pm.ICAR` (BYM2)."""
    rng = np.random.default_rng(0)
    corners = Delaunay(rng.uniform(size=(n, 2))).simplices
    adjacent = np.zeros((n, n), dtype=int)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        adjacent[corners[:, a], corners[:, b]] = adjacent[corners[:, b], corners[:, a]] = 1
    x, expected = rng.normal(size=n), rng.uniform(2.0, 8.0, size=n)
    y = rng.poisson(expected * np.exp(0.2 + 0.3 * x + 0.4 * rng.normal(size=n)))
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0.0, 2.0), pm.Normal("slope", 0.0, 1.0)
        scale, part = pm.HalfNormal("scale", 1.0), pm.Beta("part", 0.5, 0.5)
        apart, effect = pm.Normal("apart", shape=n), pm.ICAR("effect", W=adjacent)
        eta = level + slope * x + scale * (pt.sqrt(part) * effect + pt.sqrt(1.0 - part) * apart)
        pm.Poisson("y", expected * pt.exp(eta), observed=y)
    return model


def zero_sum(n: int) -> pm.Model:
    """Return counts with effects of groups that sum to zero, and of 40 others."""
    rng = np.random.default_rng(0)
    group, other, x = np.repeat(np.arange(n), 5), rng.integers(0, 40, size=5 * n), rng.normal(size=5 * n)
    rate = 0.3 + 0.4 * x + 0.6 * rng.normal(size=n)[group] + 0.3 * rng.normal(size=40)[other]
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0.0, 2.0), pm.Normal("slope", 0.0, 1.0)
        sd, sd_other = pm.HalfNormal("sd", 1.0), pm.HalfNormal("sd_other", 1.0)
        effect, of_other = pm.ZeroSumNormal("effect", sigma=sd, shape=n), pm.Normal("other", 0.0, sd_other, shape=40)
        eta = level + slope * x + effect[group] + of_other[other]
        pm.Poisson("y", pt.exp(eta), observed=rng.poisson(np.exp(rate)))
    return model


def walk(n: int) -> pm.Model:
    """Return a random walk with a free scale, seen with noise."""
    rng = np.random.default_rng(0)
    y = np.cumsum(0.1 * rng.normal(size=n)) + 0.5 * rng.normal(size=n)
    with pm.Model() as model:
        scale, first = pm.HalfNormal("scale", 1.0), pm.Normal.dist(0.0, 1.0)
        path = pm.GaussianRandomWalk("path", sigma=scale, init_dist=first, shape=n)
        pm.Normal("y", path, 0.5, observed=y)
    return model


def volatility(n: int) -> pm.Model:
    """Return returns whose log variance is a random walk with a free scale."""
    rng = np.random.default_rng(0)
    y = np.exp(0.5 * np.cumsum(0.1 * rng.normal(size=n))) * rng.normal(size=n)
    with pm.Model() as model:
        scale, first = pm.HalfNormal("scale", 1.0), pm.Normal.dist(0.0, 1.0)
        path = pm.GaussianRandomWalk("path", sigma=scale, init_dist=first, shape=n)
        pm.Normal("y", 0.0, pt.exp(0.5 * path), observed=y)
    return model


def intercepts(n_groups: int) -> pm.Model:
    """Return ten binary observations of each group, with an intercept of its own."""
    rng = np.random.default_rng(0)
    group, x = np.repeat(np.arange(n_groups), 10), rng.normal(size=10 * n_groups)
    p = 1.0 / (1.0 + np.exp(-0.5 - 0.3 * x - 0.7 * rng.normal(size=n_groups)[group]))
    with pm.Model() as model:
        level, slope, sd = pm.Normal("level", 0.0, 2.0), pm.Normal("slope", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        effect = pm.Normal("effect", 0.0, sd, shape=n_groups)
        pm.Bernoulli("y", logit_p=level + slope * x + effect[group], observed=rng.binomial(1, p))
    return model


#: Models that need no data.
SIMULATED: dict[str, Callable[[], pm.Model]] = {
    "map of 30 x 30": functools.partial(map_of, 30),
    "map of 100 x 100": functools.partial(map_of, 100),
    "map of 316 x 316": functools.partial(map_of, 316),
    "pm.ICAR, 30 x 30": functools.partial(icar, 30),
    "pm.ICAR, 60 x 60": functools.partial(icar, 60),
    "BYM2, 3,000 regions": functools.partial(regions, 3_000),
    "pm.ZeroSumNormal, 2,000 levels": functools.partial(zero_sum, 2_000),
    "walk of 5,000 steps": functools.partial(walk, 5_000),
    "walk of 100,000 steps": functools.partial(walk, 100_000),
    "volatility of 5,000 days": functools.partial(volatility, 5_000),
    "100,000 groups of 10": functools.partial(intercepts, 100_000),
}
#: Crossed effects, and what else fits them.
RATINGS = {"InstEval, normal": "lmer", "InstEval, binary": "glmmTMB"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models, and write the tables; or, as a process of such a run, fit one."""
    options = _parse_options(arguments)
    if options.cell:
        _fit(options.cell, options.data)
        return
    ours = [name for name in options.models if name in SIMULATED or options.data]
    found = {name: _measured(name, options) for name in ours}
    lines = measured_on([today_and_here()])
    header = ["model", "d", "seconds", "processor", "compiling", "peak MiB", "ELBO", "expectations", "ended"]
    keys = ("n_dim", "seconds", "cpu", "compile_seconds", "peak", "elbo", "n_gradients", "status")
    lines += [*table(header, [[name, *(_form(found[name].get(key)) for key in keys)] for name in ours]), ""]
    beside = [name for name in ours if name in RATINGS]
    if beside:
        lines += [*table(*_beside(beside, found, options)), ""]
    write_between_marks(options.table, "\n".join(lines), Path(__file__).name)


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = ["--data", options.data] if options.data else []
        found = run_process(script(__file__, *data, "--cell", name), Path(folder) / "compiled", options.limit)
    print(name, *(f"{key} {found.get(key)}" for key in ("status", "seconds", "cpu")), flush=True)
    return found


def _fit(name: str, data: Path | None) -> None:
    import pymc_ngvi

    binary = name == "InstEval, binary"
    model = SIMULATED[name]() if name in SIMULATED else crossed(ratings(data, binary=binary), binary=binary)
    start, cpu = time.perf_counter(), time.process_time()
    approx = pymc_ngvi.fit_ngvi(model=model, posterior="gaussian", random_seed=1, progressbar=False)
    report(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu, peak=peak_memory())
    report(status=str(approx.status), elbo=str(approx.elbo), n_dim=len(approx.mean_flat))
    report(n_gradients=approx.n_gradients, compile_seconds=approx.record.compile_seconds)
    few = [v.name for v in model.free_RVs if v.ndim == 0]
    draws = approx.sample(N_DRAWS, var_names=few, random_seed=1).posterior
    report(**{f"mean {v}": float(draws[v].mean()) for v in few}, **{f"sd {v}": float(draws[v].std()) for v in few})


def _beside(
    names: Sequence[str], found: dict[str, Any], options: argparse.Namespace
) -> tuple[list[str], list[list[str]]]:
    header = ["model", "fit", "seconds", "processor", "times theirs", "intercept", "sd of s", "sd of d", "noise"]
    body = []
    for name in names:
        ours, theirs = found[name], _theirs(name, options)
        of_them = [_form(theirs.get(key)) for key in ("intercept", "sd_s", "sd_d", "noise")]
        of_us = [_form(ours.get(f"mean {v}")) + _error(ours.get(f"sd {v}")) for v in ("level", "sd_s", "sd_d", "noise")]
        ratio = ours.get("cpu", np.nan) / theirs.get("processor_seconds", np.nan)
        seconds = [_form(theirs.get(key)) for key in ("seconds", "processor_seconds")]
        body.append([name, RATINGS[name], *seconds, "1", *of_them])
        body.append([name, "ours", *(_form(ours.get(key)) for key in ("seconds", "cpu")), f"{ratio:.2f}", *of_us])
    return header, body


def _theirs(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fit crossed effects in R."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ratings.csv"
        ratings(options.data, binary=name == "InstEval, binary").to_csv(file, index=False)
        command = ["Rscript", "--vanilla", str(R_SCRIPT), str(file), RATINGS[name]]
        return run_process(command, Path(folder) / "theirs", options.limit)


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.2g}"


def _form(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    page = Path(__file__).parent / "results/sparse.md"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets; without it, simulated models only")
    parser.add_argument("--models", nargs="+", default=[*RATINGS, *SIMULATED], metavar="MODEL")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--table", type=Path, default=page, help="page with marks, or a new file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
