"""Loops by `pytensor.scan`: default fits of a hidden Markov model and a state space, each written in several ways.

Each fit is the first one in a process of its own, on one thread. Beside it are means and standard deviations that share
no code with the package: of a local level by a grid of both scales, and of a hidden Markov model by many Metropolis
chains on a forward algorithm in NumPy. Rows that are there already are not measured again.

Examples
--------
::

    python scans.py
    python scans.py --before CHECKOUT
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import datetime
import functools
import json
import tempfile
import time
import warnings

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from pages import measured_on, table, write_between_marks
from records import Records, Row
from scans_models import MODELS, hmm_data, level_data
from scipy import stats

RESULTS = Path(__file__).parent / "results"
FIELDS = ("model", "code", "processor", "wall", "n_dim", "em", "es", "reliable", "posterior", "status", "date",
          "environment")  # fmt: skip
LIMIT = 1_800.0
N_CHAINS, N_STEPS, N_DROPPED = 600, 500, 150


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, measured as well")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        measure(options.worker)
        return
    records = Records(RESULTS / "scans.csv", FIELDS)
    done = {(row["model"], row["code"]) for row in records.read()}
    path = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            for code, root in (("after", path), ("before", options.before)):
                if root is None or (name, code) in done:
                    continue
                os.environ["PYTHONPATH"] = str(root)
                at = Path(folder) / f"{len(list(Path(folder).iterdir()))}"
                found = run_process(script(__file__, "--worker", name), at, LIMIT)
                row = {key: value for key, value in found.items() if key in FIELDS} | errors(name, found)
                row |= {"model": name, "code": code, "date": datetime.datetime.now().isoformat(timespec="seconds")}
                records.append(row | {"environment": describe_environment()})
                print(row, flush=True)
    write_between_marks(RESULTS / "scans.md", write_table(records.read()), Path(__file__).name)


def measure(name: str) -> None:
    """Fit a model and print the columns of its row."""
    import pymc as pm

    import pymc_ngvi  # noqa: F401 (registers the method)

    warnings.simplefilter("ignore")
    model = MODELS[name]()
    before, start = time.process_time(), time.perf_counter()
    with model:
        approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    seconds, wall = time.process_time() - before, time.perf_counter() - start
    draws = approx.sample(20_000, random_seed=2).posterior
    found = {
        str(key): (float(values.mean()), float(values.std()))
        for key, values in quantities({v: draws[v].values.reshape(20_000, *draws[v].shape[2:]) for v in draws}).items()
    }
    report(
        processor=seconds, wall=wall, n_dim=approx.layout.n_dim, reliable=str(approx.diagnose().reliable),
        posterior=approx.record.posterior, found=json.dumps(found),
    )  # fmt: skip


def quantities(draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what is compared, by name."""
    if "P" in draws:
        rows = {"stay 0": draws["P"][:, 0, 0], "stay 1": draws["P"][:, 1, 1]}
        return rows | {f"{v} {k}": draws[v][:, k] for v in ("mu", "sigma", "lam") for k in (0, 1)}
    move, noise = ("move", "noise") if "move" in draws else ("sigma_level_trend", "sigma_MeasurementError")
    return {"move": draws[move].reshape(-1), "noise": draws[noise].reshape(-1)}


def errors(name: str, found: dict[str, object]) -> dict[str, object]:
    """Return em and es, root mean squares over the quantities."""
    if "found" not in found:
        return {}
    expected, fit = reference(name), json.loads(str(found["found"]))
    em = [(fit[key][0] - mean) / sd for key, (mean, sd) in expected.items()]
    es = [fit[key][1] / sd - 1.0 for key, (_, sd) in expected.items()]
    return {"em": float(np.sqrt(np.mean(np.square(em)))), "es": float(np.sqrt(np.mean(np.square(es))))}


# --- references ---


def reference(name: str) -> dict[str, tuple[float, float]]:
    """Return means and standard deviations."""
    if name.startswith("local level"):
        # pymc-extras starts at the first observation, with an unknown level beside its variance
        return _by_grid(50.0, starts_late=True) if "extras" in name else _by_grid(25.0, starts_late=False)
    return _by_chains(is_stationary="in the step" in name)


@functools.cache
def _by_grid(variance: float, *, starts_late: bool) -> dict[str, tuple[float, float]]:
    log_scale = np.linspace(-5.0, 1.5, 400)
    move, noise = np.exp(log_scale)[:, None], np.exp(log_scale)[None]
    prior = stats.halfnorm.logpdf(move, scale=1.0) + stats.halfnorm.logpdf(noise, scale=2.0)
    logp = prior + log_scale[:, None] + log_scale[None]
    a, p = np.zeros_like(logp), np.full_like(logp, variance)
    for k, y in enumerate(level_data()):
        p = p + (move**2 if k or not starts_late else 0.0)
        f = p + noise**2
        logp += stats.norm.logpdf(y, a, np.sqrt(f))
        a, p = a + p / f * (y - a), p * noise**2 / f
    weight = np.exp(logp - logp.max())
    weight /= weight.sum()
    means = {key: float((weight * x).sum()) for key, x in (("move", move), ("noise", noise))}
    squares = {key: float((weight * x**2).sum()) for key, x in (("move", move), ("noise", noise))}
    return {key: (mean, float(np.sqrt(squares[key] - mean**2))) for key, mean in means.items()}


def _natural(theta: np.ndarray) -> dict[str, np.ndarray]:
    """Return the quantities at points (n, 8): logits of staying, means, and logarithms of what is positive."""
    stay = 1.0 / (1.0 + np.exp(-theta[:, :2]))
    values = np.column_stack([stay, theta[:, 2:4], np.exp(theta[:, 4:])])
    names = ["stay 0", "stay 1", "mu 0", "mu 1", "sigma 0", "sigma 1", "lam 0", "lam 1"]
    return dict(zip(names, values.T, strict=True))


def _log_density(theta: np.ndarray, *, is_stationary: bool) -> np.ndarray:
    y, counts = hmm_data()
    stay = np.column_stack([_natural(theta)[f"stay {k}"] for k in (0, 1)])
    mu, sigma, lam = theta[:, 2:4], np.exp(theta[:, 4:6]), np.exp(theta[:, 6:])
    logp = stats.beta.logpdf(stay, 4.0, 1.0).sum(axis=1) + np.log(stay * (1.0 - stay)).sum(axis=1)
    logp += stats.norm.logpdf(mu, 0.0, 2.0).sum(axis=1) + stats.halfnorm.logpdf(sigma, scale=2.0).sum(axis=1)
    logp += stats.gamma.logpdf(lam, 2.0, scale=2.0).sum(axis=1) + theta[:, 4:].sum(axis=1)
    state = np.full(stay.shape, 0.5)
    if is_stationary:
        state = (1.0 - stay[:, ::-1]) / (2.0 - stay.sum(axis=1, keepdims=True))
    for k, (value, count) in enumerate(zip(y, counts, strict=True)):
        if k:
            state = state * stay + (state * (1.0 - stay))[:, ::-1]
        state = state * np.exp(-0.5 * ((value - mu) / sigma) ** 2 - lam) * lam**count / sigma
        total = state.sum(axis=1)
        logp += np.log(total)
        state /= total[:, None]
    return np.where(mu[:, 0] < mu[:, 1], logp, -np.inf)


@functools.cache
def _by_chains(*, is_stationary: bool) -> dict[str, tuple[float, float]]:
    """Run chains that take the differences of others as their steps (ter Braak, 2006)."""
    rng = np.random.default_rng(7)
    centre = np.array([2.0, 1.4, -1.0, 1.0, -0.2, -0.2, 0.7, 1.6])
    theta, kept = centre + 0.2 * rng.normal(size=(N_CHAINS, 8)), []
    logp = _log_density(theta, is_stationary=is_stationary)
    for step in range(N_STEPS):
        first, second = (rng.permutation(N_CHAINS) for _ in range(2))
        jump = 1.0 if step % 10 == 9 else 2.38 / 4.0
        new = theta + jump * (theta[first] - theta[second]) + 1e-4 * rng.normal(size=theta.shape)
        found = _log_density(new, is_stationary=is_stationary)
        is_taken = np.log(rng.random(N_CHAINS)) < found - logp
        theta, logp = np.where(is_taken[:, None], new, theta), np.where(is_taken, found, logp)
        if step >= N_DROPPED:
            kept.append(theta)
    return {k: (float(v.mean()), float(v.std())) for k, v in _natural(np.concatenate(kept)).items()}


def write_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    header = ("model", "coordinates", "before, s", "now, s", "em", "es", "reliable", "posterior")
    lines = []
    for name in MODELS:
        of = {row["code"]: row for row in rows if row["model"] == name}
        if "after" not in of:
            continue
        now, old = of["after"], of.get("before", {})
        before = f"{float(old['processor']):.0f}" if old.get("processor") else old.get("status") or "-"
        verdict = {"True": "yes", "False": "no"}.get(now["reliable"], "not judged")
        cells = [f"{float(now['processor']):.1f}", *(f"{float(now[key]):.3f}" for key in ("em", "es"))]
        lines.append([name, now["n_dim"], before, *cells, verdict, now["posterior"].split(" (")[0]])
    return "\n".join([*measured_on(rows), *table(header, lines), ""])


if __name__ == "__main__":
    main()
