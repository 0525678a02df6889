"""Leave-one-out predictive densities from sites, beside fits without each observation and beside PSIS.

Three models are fitted once, with all observations, and once without each of them. What is compared is the log
predictive density of the observation that is left out: from `NGVIApproximation.sites` of the one fit; from the
fits without it, by quadrature under the Gaussian; and by PSIS of draws of the Gaussian, and of the exact posterior
where there is one.

Examples
--------
::

    python sites.py --data DATA --table tests/benchmarks/results/sites.md
"""

import argparse
import logging
import time

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm

from environment import today_and_here
from measure import Array
from pages import measured_on, table, write_between_marks
from scipy.special import gammaln, log_expit, logsumexp

import pymc_ngvi

SEED, N_DRAWS, MOST_KHAT = 1, 4_000, 0.7
#: Nodes, standard normal, of the trapezoidal rule for densities under a Gaussian that a fit gives.
NODES = np.linspace(-12.0, 12.0, 4_001)
LOG_WEIGHTS = -0.5 * NODES**2 - logsumexp(-0.5 * NODES**2)
#: Of Khan et al. (2016) for Sonar: logs of length scale and amplitude, and what their code adds to the diagonal.
SONAR = (-1.0, 6.0, 1e-4)


class Case(NamedTuple):
    """A model in which the predictor of each observation is linear in the unconstrained coordinates.

    Parameters
    ----------
    build : callable
        From the weights of observations, or None, to the model; with weights the likelihood is a Potential.
    design : ndarray, shape (n, n_dim)
        From the coordinates to the predictors.
    log_density : callable
        Of all observations, from predictors (n, n_nodes).
    """

    build: Callable[[Array | None], pm.Model]
    design: Array
    log_density: Callable[[Array], Array]


def observe(distribution: type[pm.Distribution], y: Array, weights: Array | None, **parameters: object) -> None:
    """Add a likelihood to the model in context."""
    if weights is None:
        distribution("y", **parameters, observed=y)
    else:
        pm.Potential("y", pm.Data("w", weights) * pm.logp(distribution.dist(**parameters), y))


def heart(data: Path) -> Case:
    """Return a logistic regression: 270 patients, 19 coefficients."""
    frame = pd.read_csv(data / "heart_statlog_design.csv")
    y, x = frame["y"].to_numpy(), frame.drop(columns="y").to_numpy(dtype=float)

    def build(weights: Array | None) -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, 10.0, shape=x.shape[1])
            observe(pm.Bernoulli, y, weights, logit_p=x @ beta)
        return model

    return Case(build, x, lambda eta: log_expit((2 * y[:, None] - 1) * eta))


def epilepsy(data: Path) -> Case:
    """Return a Poisson regression with an intercept for each of 59 patients, of four visits each."""
    frame = pd.read_csv(data / "epilepsy.csv")
    base, trt, age = frame["log_base4"], frame["trt"], np.log(frame["age"])
    columns = [np.ones(len(frame)), base, trt, base * trt, age - age.mean(), frame["visit_code"]]
    x, group = np.column_stack(columns).astype(float), frame["subject"].to_numpy() - 1
    y, n_groups = frame["seizures"].to_numpy(), int(group.max()) + 1

    def build(weights: Array | None) -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, 10.0, shape=x.shape[1])
            sd = pm.HalfNormal("sd", 1.0)
            u = pm.Normal("u", 0.0, sd, shape=n_groups)
            observe(pm.Poisson, y, weights, mu=pm.math.exp(x @ beta + u[group]))
        return model

    design = np.column_stack([x, np.zeros(len(y)), np.eye(n_groups)[group]])
    return Case(build, design, lambda eta: y[:, None] * eta - np.exp(eta) - gammaln(y + 1.0)[:, None])


def sonar(data: Path) -> Case:
    """Return a classification by a Gaussian process: 165 observations, a prior standard deviation of 403."""
    frame = pd.read_csv(data / "sonar.csv")
    frame = frame[frame["is_test"] == 0]
    y, x = frame["y"].to_numpy(), frame.drop(columns=["y", "is_test"]).to_numpy(dtype=float)
    log_length, log_amplitude, nugget = SONAR
    squared = ((x[:, None] - x) ** 2).sum(axis=-1)
    kernel = np.exp(2 * log_amplitude - 0.5 * squared / np.exp(2 * log_length)) + nugget * np.eye(len(x))
    root = np.linalg.cholesky(kernel)

    def build(weights: Array | None) -> pm.Model:
        with pm.Model() as model:
            v = pm.Normal("v", 0.0, 1.0, shape=len(x))  # as pm.gp.Latent has it
            observe(pm.Bernoulli, y, weights, logit_p=root @ v)
        return model

    return Case(build, root, lambda eta: log_expit((2 * y[:, None] - 1) * eta))


CASES: dict[str, Callable[[Path], Case]] = {
    "logistic regression (heart)": heart,
    "Poisson GLMM (epilepsy)": epilepsy,
    "GP classification (Sonar)": sonar,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args(arguments)
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    header = ["model", "n", "leave-one-out by", "elpd", "error, rms", "largest", "k-hat > .7", "seconds"]
    lines = []
    for name in given.models:
        rows = measure(name, CASES[name](given.data))
        print(*table(header, rows), sep="\n", flush=True)
        lines += rows
    if given.table is not None:
        measured = today_and_here()
        text = [*measured_on([measured]), *table(header, lines)]
        write_between_marks(given.table, "\n".join(text) + "\n", "sites.py")


def measure(name: str, case: Case) -> list[list[object]]:
    """Return the rows of the table of one model."""
    wanted, seconds = refitted(case)
    rows: list[list[object]] = [[name, len(wanted), "fits without it", f"{wanted.sum():.2f}", "", "", "", seconds]]
    model = case.build(None)
    gaussian = pymc_ngvi.fit_ngvi(model=model, posterior="gaussian", random_seed=SEED, progressbar=False)
    began = time.process_time()
    found = gaussian.sites()["log_density"].to_numpy()
    rows.append(_row("sites", found, wanted, "", began))
    began = time.process_time()
    rows.append(_row("PSIS, Gaussian", *psis(gaussian, model, wanted), began))
    exact = pymc_ngvi.fit_ngvi(model=model, random_seed=SEED, progressbar=False)
    if exact.is_exact:
        began = time.process_time()
        rows.append(_row("PSIS, exact posterior", *psis(exact, model, wanted), began))
    return rows


def _row(by: str, found: Array, wanted: Array, high: object, began: float) -> list[object]:
    error = found - wanted
    seconds = f"{time.process_time() - began:.2f}"
    rms, largest = np.sqrt(np.mean(error**2)), np.abs(error).max()
    return ["", "", by, f"{found.sum():.2f}", f"{rms:.2g}", f"{largest:.2g}", high, seconds]


def refitted(case: Case) -> tuple[Array, str]:
    """Return the predictive density of each observation under the Gaussian fitted without it, and the seconds."""
    n = len(case.design)
    model = case.build(np.ones(n))
    options = {"model": model, "posterior": "gaussian", "random_seed": SEED, "progressbar": False, "tol": 1e-3}
    start = pymc_ngvi.fit_ngvi(**options)
    began, result = time.process_time(), np.empty(n)
    for i in range(n):
        with model:
            pm.set_data({"w": np.where(np.arange(n) == i, 0.0, 1.0)})
        approx = pymc_ngvi.fit_ngvi(**options, start=start)
        if not approx.converged:
            raise SystemExit(f"the fit without observation {i} has not converged")
        row = case.design[i]
        used = np.flatnonzero(row)
        variance = row[used] @ approx.q.cov_block(used) @ row[used]
        eta = approx.q.mean() @ row + np.sqrt(variance) * NODES
        result[i] = logsumexp(case.log_density(np.broadcast_to(eta, (n, len(eta))))[i] + LOG_WEIGHTS)
    return result, f"{time.process_time() - began:.1f}"


def psis(approx: pymc_ngvi.NGVIApproximation, model: pm.Model, wanted: Array) -> tuple[Array, Array, int]:
    """Return leave-one-out densities by Pareto-smoothed importance sampling, the reference, and how many fail."""
    draws = approx.sample(N_DRAWS, random_seed=SEED)
    pm.compute_log_likelihood(draws, model=model, progressbar=False)
    loo = az.loo(draws, pointwise=True)
    return loo.elpd_i.to_numpy(), wanted, int((~(loo.pareto_k.to_numpy() <= MOST_KHAT)).sum())


if __name__ == "__main__":
    main()
