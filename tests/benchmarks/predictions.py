"""Predictions: processor seconds beside PyMC, and new levels of groups beside Bambi.

One thread. The first call of each makes its functions; later ones have other data of the same model. From a checkout
that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python predictions.py
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import datetime
import time
import warnings

from pathlib import Path

import bambi as bmb
import numpy as np
import pandas as pd
import pymc as pm

from environment import describe_environment
from pages import measured_on, table, write_between_marks

PAGE = Path(__file__).parent / "results" / "predictions.md"
N_DRAWS = 1_000


def seconds_of(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def beside_pymc(n_groups, n_rows):
    """Return the seconds of two calls by each: the same draws, with other predictors."""
    rng = np.random.default_rng(1)
    group, x = rng.integers(n_groups, size=n_rows), rng.normal(size=n_rows)
    with pm.Model(coords={"group": np.arange(n_groups)}) as model:
        index, predictor = pm.Data("index", group), pm.Data("x", x)
        sd, slope = pm.HalfNormal("sd"), pm.Normal("slope")
        effect = pm.Normal("effect", 0, sd, dims="group")
        eta = pm.Deterministic("eta", effect[index] + slope * predictor)
        y = rng.binomial(1, 1 / (1 + np.exp(-(rng.normal(size=n_groups)[group] + x))))
        pm.Bernoulli("y", logit_p=eta, observed=y)
        approx = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
    ours = [seconds_of(lambda: approx.predict({"x": rng.normal(size=n_rows)}, random_seed=1)) for _ in range(2)]
    draws = approx.sample(N_DRAWS, var_names=["sd", "slope", "effect"], random_seed=1)

    def by_pymc():
        with model:
            pm.set_data({"x": rng.normal(size=n_rows)})
            pm.sample_posterior_predictive(draws, predictions=True, progressbar=False, random_seed=1)

    theirs = [seconds_of(by_pymc) for _ in range(2)]
    return [f"{n_groups:,}", f"{n_rows:,}", *(f"{s:.2g}" for s in (*ours, *theirs))]


def new_groups(n_groups):
    """Return the sd of the effect of a new group given all parameters, and by each; and the correlation of two."""
    rng = np.random.default_rng(n_groups)
    group = np.repeat(np.arange(n_groups), 20)
    y = rng.normal(size=n_groups)[group] + rng.normal(0, 0.5, size=len(group))
    model = bmb.Model("y ~ 1 + (1 | g)", pd.DataFrame({"y": y, "g": [f"g{i}" for i in group]}))
    approx = model.fit(inference_method="vi", method="ngvi", random_seed=1, progressbar=False)
    draws = approx.sample(8_000, random_seed=1)
    rows = pd.DataFrame({"g": ["new", "other"]})
    of = {"approx.predict": approx.predict(rows, groups="new", draws=8_000, random_seed=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = model.predict(draws, data=rows, inplace=False, sample_new_groups=True, random_seed=1)
    of["Bambi"] = {"predictions": theirs["posterior"]}
    cells = [str(n_groups), f"{float((draws['posterior']['1|g_sigma'] ** 2).mean()) ** 0.5:.2f}"]
    common = draws["posterior"]["Intercept"].values.reshape(-1, 1)
    for found in of.values():
        effects = np.concatenate(found["predictions"]["mu"].values) - common
        cells += [f"{effects[:, 0].std():.2f}", f"{np.corrcoef(effects.T)[0, 1]:.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--print", action="store_true", help="print, and leave the page as it is")
    args = parser.parse_args()
    seconds = [beside_pymc(*sizes) for sizes in ((20, 300), (500, 5_000), (500, 50_000))]
    groups = [new_groups(n) for n in (5, 20, 100)]
    head = ["groups", "rows", "`approx.predict`, first", "later", "`pm.sample_posterior_predictive`, first", "later"]
    of_groups = [
        "groups in the fit", "sd given the parameters", "`approx.predict`: sd", "correlation of two", "Bambi: sd",
        "correlation of two",
    ]  # fmt: skip
    lines = [*table(head, seconds), "", *table(of_groups, groups)]
    print(*lines, sep="\n")
    if not args.print:
        here = {"date": datetime.datetime.now(tz=datetime.UTC).isoformat(), "environment": describe_environment()}
        write_between_marks(PAGE, "\n".join([*measured_on([here]), *lines]), Path(__file__).name)


if __name__ == "__main__":
    main()
