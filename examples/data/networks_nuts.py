"""Make ``networks_nuts.csv``: predictive probabilities of the network in ``10_neural_networks`` by NUTS.

Needs nutpie (``pip install nutpie``) and some minutes. Prints what the diagnostics of the sampler say.
"""

import sys

from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from notebooks import read_cells  # noqa: E402


def scope_of_notebook():
    """Run the cells of the notebook that make the data and the model."""
    code = [text for kind, text in read_cells(HERE.parent / "10_neural_networks.py") if kind == "code"]
    scope = {}
    for text in [code[0], *(text for text in code if text.startswith(("# The data.", "# The model.")))]:
        exec(compile(text, "10_neural_networks", "exec"), scope)
    return scope


def main():
    """Sample, predict, summarise, write."""
    scope = scope_of_notebook()
    model, points = scope["model"], np.concatenate([scope["x_test"], scope["grid"]])
    with model:
        tree = pm.sample(
            1_000, tune=1_000, chains=4, cores=1, target_accept=0.9, nuts_sampler="nutpie", random_seed=1,
            progressbar=False,
        )  # fmt: skip
        weights = tree["posterior"].to_dataset().drop_vars("p")
        print("largest R-hat of weights", {v: round(float(x.max()), 3) for v, x in az.rhat(weights).items()})
        print("divergences", int(tree["sample_stats"]["diverging"].sum()), flush=True)
        pm.set_data({"x": points})
        draws = xr.DataTree.from_dict({"posterior": weights})
        p = pm.sample_posterior_predictive(draws, var_names=["p"], predictions=True, progressbar=False)
    p = p["predictions"].to_dataset()
    ess, rhat = az.ess(p)["p"].to_numpy(), az.rhat(p)["p"].to_numpy()
    print(f"probabilities: R-hat up to {rhat.max():.4f}, effective sample sizes from {ess.min():.0f}")
    values = p["p"].to_numpy().reshape(-1, len(points))
    table = pd.DataFrame({"mean": values.mean(axis=0), "sd": values.std(axis=0), "ess": ess})
    table.insert(0, "at", ["test"] * len(scope["x_test"]) + ["grid"] * len(scope["grid"]))
    table.to_csv(HERE / "networks_nuts.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
