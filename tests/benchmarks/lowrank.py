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

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.core.types import Array

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
COLUMNS: dict[str, dict[str, Any]] = {
    "diagonal": {"family": "diagonal"},
    **{f"rank {rank}": {"family": "lowrank", "rank": rank} for rank in (1, 5, 10, 25, 50, 100)},
    "full": {"family": "full"},
}
SEEDS = 1, 2, 3


def regression(design: Array, y: Array, sd: float) -> pm.Model:
    """Return a logistic regression with a coefficient for each column."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, sd, shape=design.shape[1])
        pm.Bernoulli("y", logit_p=design @ beta, observed=y)
    return model


def german(data: Path) -> pm.Model:
    """Return the regression of the German credit data."""
    table = pd.read_csv(data / "german_credit_design.csv")
    return regression(table.drop(columns="y").to_numpy(dtype=float), table["y"].to_numpy(), 10.0)


def few_rows(data: Path) -> pm.Model:
    """Return one with 100 rows and 500 coefficients, most of them 0."""
    rng = np.random.default_rng(5)
    design = 0.15 * rng.standard_normal((100, 500))
    beta = rng.standard_normal(500) * (rng.random(500) < 0.05)
    return regression(design, (0.5 * rng.logistic(size=100) + design @ beta > 0.0).astype(int), 1.0)


def epilepsy(data: Path) -> pm.Model:
    """Return the Poisson GLMM with a random intercept and slope of 59 patients, non-centred."""
    table = pd.read_csv(EXAMPLES / "epilepsy.csv")
    log_age = np.log(table["age"].to_numpy(dtype=float))
    base, treated, visit = (table[c].to_numpy(dtype=float) for c in ("log_base4", "trt", "visit_code"))
    design = np.column_stack([np.ones(len(table)), base, treated, base * treated, log_age - log_age.mean(), visit])
    patient = table["subject"].to_numpy() - 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=6)
        sd = pm.HalfNormal("sd", 1, shape=2)
        z = pm.Normal("z", 0, 1, shape=(59, 2))
        eta = design @ beta + sd[0] * z[patient, 0] + sd[1] * z[patient, 1] * visit
        pm.Poisson("seizures", pm.math.exp(eta), observed=table["seizures"].to_numpy())
    return model


def factors(data: Path) -> pm.Model:
    """Return a normal distribution in 200 dimensions with three factors."""
    loadings = np.random.default_rng(1).standard_normal((200, 3))
    with pm.Model() as model:
        pm.MvNormal("x", np.zeros(200), cov=np.eye(200) + loadings @ loadings.T)
    return model


MODELS: dict[str, Callable[[Path], pm.Model]] = {
    "German credit, 49 coefficients": german,
    "100 rows, 500 coefficients": few_rows,
    "epilepsy, 126 coordinates": epilepsy,
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
