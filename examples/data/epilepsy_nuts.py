"""Make ``epilepsy_nuts.csv``: the posterior of the model in ``examples/epilepsy.py`` by NUTS.

Needs nutpie (``pip install nutpie``) and some minutes. Prints what the diagnostics of the sampler say.
"""

import sys

from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from epilepsy import build_model  # noqa: E402

#: Levels of the quantiles in the table.
LEVELS = np.arange(1, 100) / 100


def main():
    """Sample, summarise, write."""
    with build_model(pd.read_csv(HERE / "epilepsy.csv")):
        tree = pm.sample(
            10_000,
            tune=2_000,
            chains=4,
            cores=1,
            target_accept=0.95,
            nuts_sampler="nutpie",
            random_seed=1,
            progressbar=False,
        )
    posterior = tree["posterior"].to_dataset()[["beta", "sd"]]
    ess, rhat = az.ess(posterior), az.rhat(posterior)
    print("smallest effective sample size", {name: int(v.min()) for name, v in ess.items()})
    print("largest R-hat", {name: round(float(v.max()), 4) for name, v in rhat.items()})
    print("divergences", int(tree["sample_stats"]["diverging"].sum()))
    rows = []
    for name, variable in posterior.items():
        (dim,) = (d for d in variable.dims if d not in ("chain", "draw"))
        for label in variable[dim].values:
            draws = variable.sel({dim: label}).to_numpy().ravel()
            n = float(ess[name].sel({dim: label}))
            mcse = draws.std(ddof=1) / np.sqrt(n)
            rows.append([name, label, draws.mean(), draws.std(ddof=1), mcse, *np.quantile(draws, LEVELS)])
    quantiles = [f"q{100 * level:02.0f}" for level in LEVELS]
    table = pd.DataFrame(rows, columns=["variable", "label", "mean", "sd", "mcse_mean", *quantiles])
    table.to_csv(HERE / "epilepsy_nuts.csv", index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main()
