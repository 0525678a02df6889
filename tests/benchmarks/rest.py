"""What exact expectations would save where log p is not all rows: how much of the noise comes from the rest.

Each model is fitted with draws. At fresh draws of the result, antithetic pairs, the gradient of log p is taken, and
that of the rest alone: expectations of rows could be exact. The variance of the second, summed over the coordinates in
units of the approximation, over that of the first, is the part of the noise that would stay.

Examples
--------
::

    python rest.py
    python rest.py --models "groups: correlated effects" --table few.md
"""

import argparse
import logging

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from environment import today_and_here
from measure import Array
from pages import measured_on, table, write_between_marks
from users_models import MODELS

import pymc_ngvi

from pymc_ngvi.density import LogDensity

N_PAIRS, SEED = 500, 3
N_GROUPS, SIZE, N_EFFECTS = 40, 10, 4


def correlated_effects() -> pm.Model:
    """Random intercepts and three slopes with an unknown correlation; the likelihood is a sum over rows."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(N_GROUPS), SIZE)
    x = np.column_stack([np.ones(len(group)), rng.normal(size=(len(group), N_EFFECTS - 1))])
    effects = rng.multivariate_normal(np.zeros(N_EFFECTS), 0.5 * np.eye(N_EFFECTS) + 0.3, size=N_GROUPS)
    y = np.sum(x * effects[group], axis=1) + rng.normal(size=len(group))
    with pm.Model() as model:
        factor, *_ = pm.LKJCholeskyCov("factor", n=N_EFFECTS, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=N_EFFECTS))
        mean = pm.Normal("mean", shape=N_EFFECTS)
        effect = pm.MvNormal("effect", np.zeros(N_EFFECTS), chol=factor, shape=(N_GROUPS, N_EFFECTS))
        pm.Normal("y", pt.sum(x * (mean + effect[group]), axis=-1), pm.HalfNormal("sd"), observed=y)
    return model


def field() -> pm.Model:
    """Counts along a line, their log rates a Gaussian process with an unknown kernel, centred."""
    x, counts = np.linspace(0.0, 1.0, 30), np.random.default_rng(2).poisson(2.0, 30)
    with pm.Model() as model:
        length, height = pm.InverseGamma("length", 5.0, 1.0), pm.HalfNormal("height")
        kernel = height**2 * pt.exp(-0.5 * (x[:, None] - x) ** 2 / length**2) + 1e-4 * np.eye(30)
        pm.Poisson("y", pm.math.exp(pm.MvNormal("rate", np.zeros(30), cov=kernel)), observed=counts)
    return model


#: Models that are no sum over rows, in part.
CASES: dict[str, Callable[[], pm.Model]] = {
    "groups: correlated effects": correlated_effects,
    "fields: centred process": field,
    **{
        name: MODELS[name][1]
        for name in ("regression: horseshoe", "series and fields: basis process", "structured: several outcomes")
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models, and write the table."""
    logging.getLogger("pymc").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    page = Path(__file__).parent / "results/rows.md"
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="MODEL")
    parser.add_argument("--table", type=Path, default=page, help="page of the table")
    options = parser.parse_args(arguments)
    header = ["model", "d", "rows", "of the gradient's variance", "of the variance of log p"]
    body = [[name, *measured(CASES[name]())] for name in options.models]
    when = today_and_here()
    write_between_marks(options.table, "\n".join([*measured_on([when]), *table(header, body), ""]), Path(__file__).name)


def measured(model: pm.Model) -> list[object]:
    """Return the dimension, the number of rows, and the parts of two variances that come from the rest."""
    approx = pymc_ngvi.fit_ngvi(model=model, posterior="gaussian", random_seed=SEED, progressbar=False)
    density, q = LogDensity(model), approx.groups[0].current_state()
    rest = rest_of(density)
    z = np.random.default_rng(SEED).standard_normal((N_PAIRS, density.n_dim))
    theta = q.draws(np.concatenate([z, -z]))
    (logp, grad), (logp_of_rest, grad_of_rest) = density.logp_grad(theta), rest(theta)
    of_gradient = variance(q.whiten(grad_of_rest)) / variance(q.whiten(grad))
    of_logp = variance(logp_of_rest[:, None]) / variance(logp[:, None])
    n_rows = sum(len(rows.index) for rows in density.by_rows.reading.terms.rows)
    return [density.n_dim, n_rows, *(f"{100 * share:.0f} %" for share in (of_gradient, of_logp))]


def rest_of(density: LogDensity) -> Callable[[Array], tuple[Array, Array]]:
    """Return what evaluates the rest, (n_draws,), and its gradient, (n_draws, n_dim)."""
    reading = density.by_rows.reading
    predictors, linear = reading.predictors.vector, reading.predictors.linear_map
    total = pt.add(0.0, *reading.terms.rest)
    function = pytensor.function([predictors], [total, pytensor.grad(total, predictors)], mode="FAST_COMPILE")

    def evaluate(theta: Array) -> tuple[Array, Array]:
        values, slopes = zip(*(function(eta) for eta in linear(theta)), strict=True)
        return np.array(values), linear.transposed_times(np.array(slopes))

    return evaluate


def variance(values: Array) -> float:
    """Return the variance of means of pairs, (2 n_pairs, k), summed."""
    pairs = 0.5 * (values[:N_PAIRS] + values[N_PAIRS:])
    return float(np.var(pairs, axis=0).sum())


if __name__ == "__main__":
    main()
