"""The low-rank family beside independent coordinates and all Gaussians: ELBO and processor seconds of each.

ELBOs are taken on the same 4,000 base draws for all; medians of three seeds. Prints the table in
``docs/families/lowrank.md``. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    OPENBLAS_NUM_THREADS=1 python lowrank.py FOLDER_OF_DATA
"""

import sys
import time

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

from environment import describe_environment

sys.path.append(str(Path(__file__).parents[1]))  # models that the tests fit, too

import real_models

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.core.types import Array

COLUMNS: dict[str, dict[str, Any]] = {
    "diagonal": {"family": "diagonal"},
    **{f"rank {rank}": {"family": "lowrank", "rank": rank} for rank in (1, 5, 10, 25, 50, 100)},
    "full": {"family": "full"},
}
SEEDS = 1, 2, 3


def german(data: Path) -> pm.Model:
    """Return the regression of the German credit data."""
    table = pd.read_csv(data / "german_credit_design.csv")
    return real_models.regression(table.drop(columns="y").to_numpy(dtype=float), table["y"].to_numpy(), 10.0)


def few_rows(data: Path) -> pm.Model:
    """Return one with 100 rows and 500 coefficients, most of them 0."""
    rng = np.random.default_rng(5)
    design = 0.15 * rng.standard_normal((100, 500))
    beta = rng.standard_normal(500) * (rng.random(500) < 0.05)
    return real_models.regression(design, (0.5 * rng.logistic(size=100) + design @ beta > 0.0).astype(int), 1.0)


def factors(data: Path) -> pm.Model:
    """Return a normal distribution in 200 dimensions with three factors."""
    loadings = np.random.default_rng(1).standard_normal((200, 3))
    with pm.Model() as model:
        pm.MvNormal("x", np.zeros(200), cov=np.eye(200) + loadings @ loadings.T)
    return model


MODELS: dict[str, Callable[[Path], pm.Model]] = {
    "German credit, 49 coefficients": german,
    "100 rows, 500 coefficients": few_rows,
    "epilepsy, 126 coordinates": lambda data: real_models.epilepsy(),
    "three factors, 200 coordinates": factors,
}


def main(data: Path) -> None:
    """Print a row for each model and quantity."""
    print("| | |", " | ".join(COLUMNS), "|\n|---|---|" + "---|" * len(COLUMNS))
    for name, build in MODELS.items():
        density = LogDensity(build(data), "quick")
        z = np.random.default_rng(1).standard_normal((2_000, density.n_dim))
        z = np.concatenate([z, -z])
        elbos, seconds, states = [], [], []
        for options in COLUMNS.values():
            fits = [timed(density.model, seed, options) for seed in SEEDS]
            elbos.append(np.median([elbo(density, q, z) for q, _, _ in fits]))
            seconds.append(np.median([cpu for _, cpu, _ in fits]))
            states.append(sum(converged for _, _, converged in fits))
        print(f"| {name} | ELBO |", " | ".join(f"{nats:.2f}" for nats in elbos), "|")
        print("| | seconds |", " | ".join(f"{s:.1f}" for s in seconds), "|")
        print("| | converged |", " | ".join(f"{n} of {len(SEEDS)}" for n in states), "|", flush=True)
    print(describe_environment())


def elbo(density: LogDensity, q: Any, z: Array) -> float:
    """Return the mean of log p - log q over the draws that base draws give."""
    theta = q.draws(z)
    return float(np.mean(density.logp(theta) - q.log_density(theta)))


def timed(model: pm.Model, seed: int, options: dict[str, Any]) -> tuple[Any, float, bool]:
    """Return q, processor seconds, and whether the fit converged."""
    start = time.process_time()
    approx = fit_ngvi(model=model, random_seed=seed, progressbar=False, posterior="gaussian", **options)
    return approx.q, time.process_time() - start, approx.converged


if __name__ == "__main__":
    main(Path(sys.argv[1]))
