"""Regressions on raw data, with far starts: how many seeds converge, and how far their ELBOs are apart.

Ten models of the kind that a first hour brings: nothing is standardised, predictors have means of 100 to 10,000, priors
are flat, very wide or the defaults of textbooks. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python raw_scale.py --seeds 100 --table raw_scale.md
"""

import argparse
import warnings

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from pymc_ngvi import fit_ngvi

HEADER = "| model | rows | predictors | converged | ended otherwise | range of the ELBO | gradients | Hessians |"
#: Name: rows, means and sds of predictors, intercept, slopes, residual sd, prior sd of coefficients (None: flat), prior
#: of the residual sd.
MODELS: dict[str, tuple[Any, ...]] = {
    "iq, flat": (400, (100,), (15,), 10.0, (0.6,), 18.0, None, pm.HalfCauchy.dist(2.5)),
    "iq, wide": (400, (100,), (15,), 10.0, (0.6,), 18.0, 100.0, pm.HalfCauchy.dist(2.5)),
    "heights": (200, (170,), (8,), -80.0, (0.9,), 9.0, 50.0, pm.Exponential.dist(1.0)),
    "earnings": (600, (170, 40), (10, 12), -9e3, (150.0, 300.0), 2e4, None, pm.HalfCauchy.dist(25.0)),
    "prices": (300, (1500, 30, 3), (500, 15, 1), 4e4, (120.0, -400.0, 9e3), 3e4, 1e5, pm.HalfNormal.dist(1e4)),
    "cars": (150, (3000, 100, 2000), (800, 30, 300), 46.0, (-5e-3, -3e-2, 1e-3), 3.0, 10.0, pm.Exponential.dist(1.0)),
    "yields": (100, (10_000,), (1_500,), 20.0, (0.004,), 6.0, 100.0, pm.InverseGamma.dist(2.0, 1.0)),
    "years": (120, (1_950,), (30,), -30.0, (0.02,), 0.4, None, pm.HalfNormal.dist(1.0)),
    "incomes": (500, (45, 12, 20_000), (10, 3, 6_000), 1e4, (200.0, 2e3, 0.5), 9e3, None, pm.HalfCauchy.dist(2.5)),
    "few rows": (25, (250, 80), (40, 10), 5.0, (0.2, -0.3), 4.0, 20.0, pm.HalfCauchy.dist(5.0)),
}  # fmt: skip


def raw_regression(name: str) -> pm.Model:
    """Return one of the ten models, with data made for it."""
    n, means, sds, intercept, slopes, residual, prior_sd, scale = MODELS[name]
    rng = np.random.default_rng(list(MODELS).index(name))
    x = rng.normal(means, sds, (n, len(means)))
    y = intercept + x @ np.array(slopes) + residual * rng.standard_normal(n)
    with pm.Model() as model:
        size = len(means)
        intercept = pm.Flat("intercept") if prior_sd is None else pm.Normal("intercept", 0.0, prior_sd)
        beta = pm.Flat("beta", shape=size) if prior_sd is None else pm.Normal("beta", 0.0, prior_sd, shape=size)
        sigma = model.register_rv(scale.owner.clone().outputs[-1], "sigma")
        pm.Normal("y", intercept + x @ beta, sigma, observed=y)
    return model


def main() -> None:
    """Fit each model with each seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="run the seeds 1 to this")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--table", type=Path, required=True, help="Markdown file to write")
    options = parser.parse_args()
    lines = [HEADER, "|" + "---|" * HEADER.count("| ")]
    for name in options.models:
        model = raw_regression(name)
        lines.append(row(name, [fitted(model, seed + 1) for seed in range(options.seeds)]))
        print(lines[-1], flush=True)
        options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fitted(model: pm.Model, seed: int) -> Any:
    """Return the approximation of one seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_ngvi(model=model, random_seed=seed, progressbar=False)


def row(name: str, fits: list[Any]) -> str:
    """Return a row of the table."""
    elbos = [a.elbo.value for a in fits]
    other = Counter(str(a.status) for a in fits if not a.converged)
    ended = ", ".join(f"{status}: {n}" for status, n in other.items()) or "-"
    n_gradients, n_hessians = (np.mean([getattr(a, x) for a in fits]) for x in ("n_gradients", "n_hessians"))
    return (
        f"| {name} | {MODELS[name][0]} | {len(MODELS[name][1])} | {sum(a.converged for a in fits)} of {len(fits)} "
        f"| {ended} | {np.ptp(elbos):.3f} | {n_gradients:,.0f} | {n_hessians:,.0f} |"
    )


if __name__ == "__main__":
    main()
