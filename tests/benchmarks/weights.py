"""Weights of a mixture: the natural gradient against another direction as printed in a paper [1]_, side by side.

No step rule takes part: from a common start, all components and the weights move by plain steps of one size, on fixed
quasi-random draws; runs differ in the direction of the weights alone. Each again in coordinates to which 10 is added. A
run can be stopped and resumed: starts that are in the results file already are not run again. From a checkout that is
not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python weights.py
    python weights.py --targets banana --seeds 2 --out small.csv --table small.md
    python weights.py --seeds 0

References
----------
.. [1] L. S. L. Tan (2021). Complete natural gradients for structured variational approximations in mixtures of
   exponential families: theorem 2, whose extra terms cancel when all are kept. An early version of
   https://doi.org/10.48550/arXiv.2109.00375
"""

import argparse
import datetime
import itertools
import sys

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from environment import describe_environment
from measure import Array
from pages import column_of, measured_on, table, write_between_marks
from records import Records, Row
from threadpoolctl import threadpool_limits

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.types import BaseDraws, MeanHessian
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState, MixtureState
from pymc_ngvi.methods import UPDATES
from pymc_ngvi.methods.estimators import Moments, price
from pymc_ngvi.methods.mixtures import ComponentTarget, stepped_weights

sys.path.append(str(Path(__file__).parents[1]))  # the targets are among the tests

from mixture_targets import target

#: Components of the approximation of each target.
COMPONENTS = {"two modes": 2, "Student-t mixture": 3, "banana": 3}
NAMES = {"natural": "natural", "tan": "as printed"}
SHIFTS, STEP_SIZES = (0.0, 10.0), (0.1, 0.3)
#: Iterations; draws of a component in each; draws of a component that ELBOs are measured on.
MOST, N_DRAWS, N_MEASURED = 300, 128, 512
#: Of the means of the start, around that of the target, and of its components.
SCATTER, START_SD = 2.0, 1.5
CLOSE = 0.1  # nats
ALIVE = 0.01
KEY = ("target", "seed", "shift", "step_size", "update")
FIELDS = (
    *KEY, "n_components", "elbo", "optimum", "arrived", "n_iterations", "n_alive", "status", "date", "environment",
)  # fmt: skip

CAPTION = f"""\
All components take the natural-gradient step of a Gaussian for log p + log(q_c / q) (exact Hessians, {N_DRAWS} fixed
Sobol draws each), the log weights one along the direction that is named, of the same size, for {MOST} iterations. The
start has equal weights, means scattered by N(0, {SCATTER:g}^2) around the mean of the target, and standard deviations
{START_SD:g}; it is the same for both directions, and moves with the coordinates. The ELBO on {N_MEASURED:,} other draws
of each component is compared with the optimum, the best that any run from this start came to. Arrived: within
{CLOSE:g} nats of the optimum at the end; the iterations are those after which it stays there, the median over seeds
that arrive in both. Components left: with a weight of at least {ALIVE:g} at the end, mean. Lost: no valid covariance,
or no finite ELBO, after some iteration. The rows are in `tests/benchmarks/results/weights.csv`.
"""


class Shifted:
    """A log density in coordinates to which a number is added: what a component needs of it.

    Parameters
    ----------
    density : LogDensity
    shift : float
    """

    def __init__(self, density: LogDensity, shift: float) -> None:
        self._density, self._shift, self.n_dim = density, shift, density.n_dim

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p and its gradient at the rows of ``theta``."""
        return self._density.logp_grad(theta - self._shift)

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean over draws of the Hessian."""
        return self._density.mean_hessian(theta - self._shift)


class Run(NamedTuple):
    """Outcome of a run.

    Parameters
    ----------
    elbos : ndarray, shape (n_iterations + 1,)
        Of the start and after each iteration.
    weights : ndarray, shape (n_components,)
        At the end.
    status : str
    """

    elbos: Array
    weights: Array
    status: str

    def arrived(self, optimum: float) -> int | None:
        """Return the iterations after which the ELBO stays near the optimum; None where it does not."""
        away = np.flatnonzero(~(self.elbos >= optimum - CLOSE))
        first = int(away[-1]) + 1 if len(away) else 0
        return first if first < len(self.elbos) else None


def run(density: Shifted, elbo: Callable[[MixtureState], float], q: MixtureState, update: str, step_size: float) -> Run:
    """Take plain steps of all components and of the weights from a state."""
    # Errors of the moments are not asked for: one replicate saves calls.
    base = replace(sobol_draws(N_DRAWS, q.n_dim, np.random.default_rng(0)), n_replicates=1)
    elbos = [elbo(q)]
    for _ in range(MOST):
        moved = joint_step(density, q, base, update, step_size)
        value = -np.inf if moved is None else elbo(moved)
        if moved is None or not np.isfinite(value):
            return Run(np.array(elbos), q.weights, "lost")
        q = moved
        elbos.append(value)
    return Run(np.array(elbos), q.weights, "")


def printed_direction(q: MixtureState, rewards: Array, moments: Sequence[Moments]) -> Array:
    """Return R_c + b_c, with b_c = mu_c . g_c + tr((Sigma_c - mu_c mu_c^T) H_c) / 2 for dense components.

    g_c and H_c are gradient and Hessian of log p - log q under the component, of which the moments hold C^T g_c and
    I - C^T H_c C.
    """
    result = rewards.copy()
    for i, (component, of_component) in enumerate(zip(q.components, moments, strict=True)):
        inverse, mean = np.linalg.inv(component.factor), component.mean()
        gradient = inverse.T @ of_component.grad
        hessian = inverse.T @ (np.eye(q.n_dim) - of_component.curvature) @ inverse
        result[i] += mean @ gradient + 0.5 * np.sum((component.cov() - np.outer(mean, mean)) * hessian)
    return result


def joint_step(
    density: Shifted, q: MixtureState, base: BaseDraws, update: str, step_size: float
) -> MixtureState | None:
    """Move components and weights together; None where a component has no valid covariance."""
    rewards, moments = [], []
    for c, component in enumerate(q.components):
        of_component = ComponentTarget(density, q, c)
        evaluation = price.evaluate(of_component, component, base)
        rewards.append(evaluation.elbo)
        moments.append(price.moments(of_component, component, base, evaluation))
    components = [UPDATES["natural"](c, m, step_size, True) for c, m in zip(q.components, moments, strict=True)]
    direction = np.array(rewards) if update == "natural" else printed_direction(q, np.array(rewards), moments)
    if any(c is None for c in components) or not np.isfinite(direction).all():
        return None
    return MixtureState.of(components, stepped_weights(q.log_weights, direction, step_size))


def measure_elbo(log_p: Callable[[Array], Array], base: BaseDraws) -> Callable[[MixtureState], float]:
    """Return the function from a mixture to its ELBO on draws of each component."""

    def elbo(q: MixtureState) -> float:
        draws = [c.draws(base.z) for c in q.components]
        return float(sum(w * np.mean(log_p(t) - q.log_density(t)) for w, t in zip(q.weights, draws, strict=True)))

    return elbo


def start_of(name: str, seed: int, shift: float) -> MixtureState:
    """Return the common start of all runs."""
    rng, known = np.random.default_rng(seed), target(name)
    centre = known.sample(10_000, np.random.default_rng(0)).mean(axis=0)
    means = centre + shift + SCATTER * rng.standard_normal((COMPONENTS[name], known.n_dim))
    return MixtureState.of([FullState.from_scale(mean, np.full(known.n_dim, START_SD)) for mean in means])


def run_start(records: Records, name: str, seed: int, density: LogDensity) -> None:
    """Run everything from one start, and append the rows."""
    known = target(name)
    base = sobol_draws(N_MEASURED, known.n_dim, np.random.default_rng(1))
    runs: dict[tuple[float, float, str], Run] = {}
    for shift, step_size, update in itertools.product(SHIFTS, STEP_SIZES, NAMES):
        elbo = measure_elbo(lambda theta, s=shift: known.log_density(theta - s), base)
        runs[shift, step_size, update] = run(
            Shifted(density, shift), elbo, start_of(name, seed, shift), update, step_size
        )
    optimum = max(float(found.elbos.max()) for found in runs.values())
    date = datetime.datetime.now().isoformat(timespec="seconds")
    for key, found in runs.items():
        row = dict(zip(KEY, (name, seed, *key), strict=True))
        row |= {"n_components": COMPONENTS[name], "elbo": float(found.elbos[-1]), "optimum": optimum}
        row |= {"arrived": None if found.status else found.arrived(optimum), "n_iterations": len(found.elbos) - 1}
        row |= {"n_alive": int((found.weights >= ALIVE).sum()), "status": found.status}
        records.append({**row, "date": date, "environment": describe_environment()})


def run_missing(records: Records, options: argparse.Namespace) -> None:
    """Run the starts of which a row is missing."""
    for name in options.targets:
        done = [row for row in records.read() if row["target"] == name]
        complete = len(SHIFTS) * len(STEP_SIZES) * len(NAMES)
        seeds = [s for s in range(1, options.seeds + 1) if sum(row["seed"] == str(s) for row in done) < complete]
        if not seeds:
            continue
        density = LogDensity(target(name).build(), backend="numba")  # compiled once, called a hundred thousand times
        for seed in seeds:
            records.drop(lambda row, key=(name, str(seed)): (row["target"], row["seed"]) == key)
            run_start(records, name, seed, density)
            print(f"{name} seed {seed}", flush=True)


def write_tables(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    if not rows:
        return "No results.\n"
    header = ["target", "components", "added", "step", "direction", "arrived", "iterations to arrive, both"]
    header += ["nats short at the end, median", "largest", "lost", "components left"]
    lines = []
    for name, shift, step_size in itertools.product(COMPONENTS, SHIFTS, STEP_SIZES):
        key = (name, str(shift), f"{step_size:.8g}")
        own = [r for r in rows if (r["target"], str(float(r["shift"])), f"{float(r['step_size']):.8g}") == key]
        by_update = {update: {r["seed"]: r for r in own if r["update"] == update} for update in NAMES}
        both = [s for s in by_update["natural"] if all(of[s]["arrived"] for of in by_update.values())]
        for update, of in by_update.items() if own else ():
            lines.append([name, own[0]["n_components"], f"{shift:g}", f"{step_size:g}", NAMES[update]])
            lines[-1] += _cells(list(of.values()), [of[s] for s in both])
    return "\n".join([*measured_on(rows), CAPTION, *table(header, lines), ""])


def _cells(rows: Sequence[Row], comparable: Sequence[Row]) -> list[str]:
    of = column_of(rows)
    short = of("optimum") - of("elbo")
    iterations = column_of(comparable)("arrived")
    return [
        f"{len(of('arrived'))} of {len(rows)}",
        f"{np.median(iterations):.0f}" if len(iterations) else "-",
        f"{np.median(short):.3f}",
        f"{short.max():.3g}",
        str(sum(row["status"] == "lost" for row in rows)),
        f"{of('n_alive').mean():.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--targets", nargs="+", choices=COMPONENTS, default=list(COMPONENTS), metavar="TARGET")
    parser.add_argument("--seeds", type=int, default=20, help="run the starts 1 to this; 0: only the table")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weights.csv")
    page = Path(__file__).parent / "results" / "weights.md"
    parser.add_argument("--table", type=Path, default=page, help="page with marks, or a new file")
    options = parser.parse_args(arguments)
    records = Records(options.out, FIELDS)
    with threadpool_limits(1, user_api="blas"):
        run_missing(records, options)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


if __name__ == "__main__":
    main()
