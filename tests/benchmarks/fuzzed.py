"""Models at random: whether fits and reports of them work, agree with one another, and are right.

A row for each model, and a table at the end. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python tests/benchmarks/fuzzed.py --first 1 --last 40
    python tests/benchmarks/fuzzed.py --first 7 --last 7 --nuts 1
"""

import os

os.environ.setdefault("PYMC_NGVI_RAISE", "1")
os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # compilers would take most of the time

import argparse
import logging
import pickle
import signal
import tempfile
import time
import traceback
import warnings

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm

from fuzzed_models import simulated
from measure import Array, coordinate_names, log_density_of, unconstrain

import pymc_ngvi

#: What is wrong: standard deviations of a mean, a relative error of a standard deviation, and standard errors of both.
OF_MEAN, OF_SD, N_ERRORS = 0.15, 0.12, 4.0
#: Points of a grid along each of one to three coordinates, and how often its box is cut to where there is mass.
POINTS, N_CUTS, NEGLIGIBLE = {1: 801, 2: 121, 3: 49}, 12, 16.0
#: Coordinates of models that are compared with an ensemble of walkers; these, and their steps before and after a while.
MOST_OF_ENSEMBLE, N_WALKERS, N_BEFORE, N_STEPS, N_PARTS = 12, 240, 400, 1_200, 20
#: Words of summaries by verdict.
WORDS = {
    "exact": "Exact", "exact, few draws": "There are few draws", "reliable": "reliable",
    "not judged": "not judged", "not reliable": "Not reliable",
}  # fmt: skip
Moments = tuple[Array, Array, Array | float]


class TooLong(BaseException):
    """A call took more seconds than it had."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in a call that takes more seconds of the processor."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


class Exam:
    """What is asked of one model, and what went wrong."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed, self.seconds, self.faults, self.refusals = seed, seconds, list[str](), list[str]()
        self.times = dict[str, float]()
        self.said, self.model, self.columns = simulated(seed)

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function; its errors are refusals, if the package raises them in a sentence, or faults."""
        start = time.process_time()
        try:
            with limit(self.seconds):
                return function()
        except TooLong:
            self.faults.append(f"slow: {what} takes more than {self.seconds:.0f} s")
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            is_ours = "pymc_ngvi/" in last.filename and (last.line or "").strip().startswith("raise")
            if is_ours and not isinstance(error, (LookupError, AttributeError, AssertionError)):
                self.refusals.append(said)
            else:
                self.faults.append(f"crash: {said} [{Path(last.filename).name}:{last.lineno}]")
        finally:
            self.times[what] = round(time.process_time() - start, 2)
        return None

    def run(self, nuts: int) -> dict[str, Any]:
        """Return the row of the model."""
        row = {"seed": self.seed, "model": self.said, "n_dim": len(coordinate_names(self.model))}
        start = time.process_time()
        many = self.call("fit_many", self.many) if self.seed % 5 == 0 else None
        seed = self.seed if many is None else int(many["seed"][0])
        begun = time.process_time()
        approx = self.call("fit", lambda: pymc_ngvi.fit_ngvi(self.model, random_seed=seed, progressbar=False))
        row["fit_seconds"] = round(time.process_time() - begun, 1)
        if approx is not None:
            row["posterior"] = approx.record.kind
            word = self.call("verdict", lambda: self.verdicts(approx, many))
            row["verdict"] = str(word)
            self.reports(approx)
            self.call("comparison", lambda: row.update(compared=self.compare(approx, nuts)))
        seconds = round(time.process_time() - start, 1)
        return {**row, "seconds": seconds, "faults": self.faults, "refused": self.refusals, "times": self.times}

    def many(self) -> Any:
        """Return the table of `fit_many` on the data of the model, which the fit is to agree with."""
        y = self.model["y"] if "y" in self.model.named_vars else None
        if y not in self.model.observed_RVs:
            return None
        data = [{"y": self.model.rvs_to_values[y].data}]
        found = pymc_ngvi.fit_many(self.model, data, random_seed=self.seed, judge=True, progressbar=False).dataset
        if found["error"].values[0]:
            self.faults.append(f"crash: fit_many: {found['error'].values[0]}")
            return None
        return found

    def verdicts(self, approx: Any, many: Any) -> str:
        """Return the word of the verdict, after a look at all places that have one."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fit.nc"
            approx.save(path)
            loaded = pymc_ngvi.load(path, self.model)
        pickled = pickle.loads(pickle.dumps(approx))
        checks = approx.checks
        word, sentence = str(checks.word), checks.sentence
        summaries = [" ".join(str(of.summary(random_seed=1)).split()) for of in (approx, approx, loaded)]
        if summaries[0] != summaries[1]:
            self.faults.append("differs: two summaries")
        if summaries[0] != summaries[2]:
            self.faults.append("differs: summary of the file")
        diagnosis = approx.diagnose(random_seed=self.seed)
        places = {
            "diagnosis": str(diagnosis.checks.word), "checks again": str(approx.checks.word),
            "file": str(loaded.checks.word), "pickle": str(pickled.checks.word),
            "draws": approx.sample(50, random_seed=1).attrs["verdict"],
        }  # fmt: skip
        if word != "not judged":
            places["record"] = str(approx.record.verdict.word) if approx.record.verdict.is_tested else word
        else:
            places = {name: word for name in places}
        if many is not None:
            places["fit_many"] = str(many["verdict"].values[0])
        wrong = {place: said for place, said in places.items() if said != word}
        self.faults += [f"differs: {place} says {said!r}, checks {word!r}" for place, said in wrong.items()]
        if word != "not judged" and (loaded.checks.sentence != sentence or pickled.checks.sentence != sentence):
            self.faults.append(f"differs: sentence {sentence!r}, of the file {loaded.checks.sentence!r}")
        now = str(approx.checks.word)
        if WORDS[now] not in summaries[0] or (now == "reliable" and "Not reliable" in summaries[0]):
            self.faults.append(f"differs: summary lacks {WORDS[now]!r}: {summaries[0][:300]}")
        if approx.checks.is_exact != approx.is_exact or diagnosis.reliable != approx.checks.is_reliable:
            self.faults.append("differs: is_exact or is_reliable")
        return now

    def reports(self, approx: Any) -> None:
        """Call what there is after a fit."""
        n = 3
        new = {name: value[:n] for name, value in self.columns.items()}
        has_groups = any("group" in dims for dims in self.model.named_vars_to_dims.values())
        labels = {**new, "member": [*(f"g{i}" for i in new["member"][:-1]), "another"]} if new and has_groups else {}
        y = approx.model["y"] if "y" in approx.model.named_vars else None
        self.call("sample", lambda: approx.sample(200, random_seed=1))
        self.call("predict", lambda: approx.predict(random_seed=1, draws=100))
        self.call("log likelihood", lambda: approx.sample(50, log_likelihood=True))
        self.call("tree", lambda: approx.to_datatree(20))
        self.call("leave out", lambda: approx.leave_out(refit=False, random_seed=1))
        free = next((v for v in self.model.free_RVs if v.ndim == 0), None)
        if free is not None:
            prior = pm.HalfNormal.dist(0.7) if free.name.startswith("s") else pm.Normal.dist(0.1, 1.5)
            self.call("with prior", lambda: approx.with_prior({free.name: prior}).summary())
        if new:
            self.call("predict new", lambda: approx.predict(new, random_seed=1, draws=100))
        if labels:
            self.call("predict new levels", lambda: approx.predict(labels, groups="new", random_seed=1, draws=100))
        if y in self.model.observed_RVs:
            some = {**new, "y": self.model.rvs_to_values[y].data[:n]}
            self.call("update", lambda: approx.update(some, random_seed=1).summary())

    def compare(self, approx: Any, nuts: int) -> str:
        """Compare what is reliable with a reference, and return which one."""
        points = approx.draw_flat(4, random_seed=3)
        is_seventh = self.seed % 7 == 0  # it takes seconds to compile
        known = log_density_of(self.model)(points) if is_seventh else None
        if known is not None and not np.allclose(np.diff(approx.log_p(points)), np.diff(known), rtol=1e-6, atol=1e-6):
            self.faults.append(f"wrong: log p {approx.log_p(points)}, of PyMC {known}")
        n_dim, reference, how = points.shape[1], None, ""
        if n_dim in POINTS:
            reference, how = on_grid(approx.log_p, points), "quadrature"
        elif n_dim <= MOST_OF_ENSEMBLE and approx.checks.is_reliable:
            reference, how = (
                by_ensemble(approx.log_p, approx.draw_flat(N_WALKERS, random_seed=4), self.seed),
                "ensemble",
            )
        elif nuts and self.seed % nuts == 0 and approx.checks.is_reliable:
            reference, how = by_sampling(self.model, self.seed), "NUTS"
        if reference is None:
            return ""
        worth = approx.checks.worth
        said = wrong(coordinate_names(self.model), (approx.mean_flat, approx.sd_flat, worth), reference)
        if approx.checks.is_reliable:
            self.faults += [f"wrong: {sentence}" for sentence in said[:4]]
        elif not said:
            self.refusals.append(f"false alarm: {approx.checks.sentence[:200]}")
        return how


def wrong(names: Sequence[str], found: Moments, reference: Moments) -> list[str]:
    """Return what is off, in sentences; effective sizes are NaN where moments have no error."""
    (mean, sd, n), (of_mean, of_sd, of_n) = found, reference
    se = np.sqrt((0.0 if np.isnan(n) else 1.0 / n) + 1.0 / np.asarray(of_n))
    off, ratio = np.abs(mean - of_mean) / of_sd, np.log(sd / of_sd)
    is_off = (off > np.maximum(OF_MEAN, N_ERRORS * se)) | (np.abs(ratio) > np.maximum(OF_SD, N_ERRORS * 1.5 * se))
    return [f"{names[i]}: mean off by {off[i]:.2f} sd, sd by {np.expm1(ratio[i]):+.0%}" for i in np.flatnonzero(is_off)]


def on_grid(log_p: Callable[[Array], Array], known: Array) -> Moments | None:
    """Return moments by a grid on a box that is cut to where there is mass; None where it misses known points."""
    n_dim = known.shape[1]
    low, high = np.full(n_dim, -60.0), np.full(n_dim, 60.0)
    for _ in range(N_CUTS):
        axes = [np.linspace(*ends, POINTS[n_dim]) for ends in zip(low, high, strict=True)]
        points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        with np.errstate(all="ignore"):
            values = np.nan_to_num(
                log_p(points.reshape(-1, n_dim)).reshape(points.shape[:-1]), nan=-np.inf, posinf=-np.inf
            )
        some = points[values > values.max() - NEGLIGIBLE]
        gaps = (high - low) / (POINTS[n_dim] - 1)
        low, high = np.maximum(some.min(axis=0) - gaps, low), np.minimum(some.max(axis=0) + gaps, high)
    moments = []
    for step in (1, 2):
        coarse = (slice(None, None, step),) * n_dim
        weights, at = np.exp(values[coarse] - values.max()).ravel(), points[coarse].reshape(-1, n_dim)
        mean = np.average(at, axis=0, weights=weights)
        moments.append((mean, np.sqrt(np.average((at - mean) ** 2, axis=0, weights=weights))))
    misses = np.median(log_p(known)) > values.max()
    is_accurate = np.allclose(moments[0][1], moments[1][1], rtol=0.02) and (high - low).max() < 100.0 and not misses
    return (*moments[0], np.inf) if is_accurate else None


def by_ensemble(log_p: Callable[[Array], Array], x: Array, seed: int) -> Moments:
    """Return moments and effective sizes of walkers that take differences of others as steps, from wider draws."""
    rng, (n, n_dim) = np.random.default_rng(seed), x.shape
    wide = x.mean(axis=0) + 1.5 * (x - x.mean(axis=0))
    x = np.where(np.isfinite(log_p(wide))[:, None], wide, x)  # where p is 0, walkers would not find back
    now, halves, sums = log_p(x), np.arange(n).reshape(2, -1), []
    for i in range(N_BEFORE + N_STEPS):
        for own, other in (halves, halves[::-1]):
            ways = x[rng.choice(other, len(own))] - x[rng.choice(other, len(own))]
            lengths = rng.choice([1.0, 2.38 / np.sqrt(2.0 * n_dim), 0.5 / np.sqrt(n_dim)], size=len(own))
            new = x[own] + lengths[:, None] * ways * (1.0 + 1e-3 * rng.normal(size=ways.shape))
            values = np.nan_to_num(log_p(new), nan=-np.inf, neginf=-np.inf)
            moved = np.log(rng.random(len(own))) < values - now[own]
            x[own[moved]], now[own[moved]] = new[moved], values[moved]
        if i >= N_BEFORE:
            sums.append((x.mean(axis=0), (x**2).mean(axis=0)))
    mean, square = np.mean(sums, axis=0)
    variance = square - mean**2
    parts = np.array([part.mean(axis=0) for part in np.array_split(np.array(sums), N_PARTS)])
    parts[:, 1] += mean**2 - 2.0 * mean * parts[:, 0]  # squares around the mean: heavy tails make them differ
    of_mean, of_variance = parts.var(axis=0, ddof=1) / N_PARTS
    return mean, np.sqrt(variance), np.minimum(variance / of_mean, 9.0 * variance**2 / of_variance)


def by_sampling(model: pm.Model, seed: int) -> Moments | None:
    """Return moments and effective sizes of NUTS; None where its chains do not agree."""
    with model:
        posterior = pm.sample(
            700,
            tune=700,
            chains=4,
            cores=1,
            random_seed=seed,
            progressbar=False,
            compile_kwargs={"mode": "NUMBA"},
        )["posterior"]
    draws = unconstrain(posterior, model).reshape(4, 700, -1)
    data = {str(i): draws[..., i] for i in range(draws.shape[-1])}
    sizes = np.array([float(az.ess(data[key], method="mean")) for key in data])
    if max(float(az.rhat(values)) for values in data.values()) > 1.03:
        return None
    flat = draws.reshape(-1, draws.shape[-1])
    return flat.mean(axis=0), flat.std(axis=0), sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Examine models, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a call may take")
    parser.add_argument("--nuts", type=int, default=0, help="compare one in so many of the larger models with NUTS")
    options = parser.parse_args(arguments)
    for name in ("pymc.ngvi", "pymc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    counts, seconds = Counter[str](), list[float]()
    for seed in range(options.first, options.last + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = Exam(seed, options.seconds).run(options.nuts)
        print(row, flush=True)
        seconds.append(row["seconds"])
        kinds = {fault.partition(":")[0] for fault in row["faults"]} or {"in order"}
        counts.update([f"{row.get('posterior')}, {row.get('verdict')}", *kinds])
        counts.update(f"refused: {said.partition(':')[0]}" for said in row["refused"])
    print(f"{len(seconds)} models, {sum(seconds):.0f} s; median {np.median(seconds):.1f}, most {max(seconds):.1f}")
    print("\n".join(f"| {name} | {n} |" for name, n in counts.most_common()))


if __name__ == "__main__":
    main()
