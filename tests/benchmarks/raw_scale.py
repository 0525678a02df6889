"""Regressions on raw data, with far starts: how many seeds converge, and how far their ELBOs are apart.

Ten models of the kind that a first hour brings: nothing is standardised, predictors have means of 100 to 10,000, priors
are flat, very wide or the defaults of textbooks. Fits that are in the results
file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python raw_scale.py --seeds 100
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from fits_by_seed import FIELDS, ended, mean, parser_of, run_missing, write_page
from records import Records, Row

HEADER = "model", "rows", "predictors", "converged", "ended otherwise", "range of the ELBO", "gradients", "Hessians"
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit each model with each seed that is missing, and write the table."""
    options = parser_of(__doc__, MODELS, "raw_scale", 100).parse_args(arguments)
    records = Records(options.out, FIELDS)
    for name in options.models if options.seeds else ():
        run_missing(records, name, raw_regression(name), range(1, options.seeds + 1))
    write_page(options.table, HEADER, records.read(), cells, Path(__file__).name)


def cells(name: str, rows: Sequence[Row]) -> list[object]:
    """Return a row of the table."""
    others = [row for row in rows if row["status"] != "converged"]
    n_converged = f"{len(rows) - len(others)} of {len(rows)}"
    spread = np.ptp([float(row["elbo"]) for row in rows])
    n, means = MODELS[name][:2]
    effort = [mean(rows, column) for column in ("n_gradients", "n_hessians")]
    return [name, n, len(means), n_converged, ended(others), f"{spread:.3f}", *effort]


if __name__ == "__main__":
    main()
