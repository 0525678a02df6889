"""Make ``latent_nuts.csv``: the posteriors of the models in ``08_latent_gaussian`` by NUTS.

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

from notebooks import read_cells  # noqa: E402

#: Draws and variables, by the name of the model in the notebook.
MODELS = {
    "areas": (4_000, ["level", "sd", "share", "log_risk"]),
    "classes": (1_000, ["length", "size", "surface"]),
    "volatility": (6_000, ["step", "path"]),
}
#: Levels of the quantiles in the table, in percent.
LEVELS = range(5, 100, 5)


def models():
    """Return the models of the notebook by name: cells that begin with "# The model."."""
    code = [text for kind, text in read_cells(HERE.parent / "08_latent_gaussian.py") if kind == "code"]
    scope = {}
    for text in [code[0], *(text for text in code if text.startswith("# The model."))]:
        exec(compile(text, "08_latent_gaussian", "exec"), scope)
    return {name: scope[name] for name in MODELS}


def main():
    """Sample, summarise, write."""
    rows = []
    for name, model in models().items():
        n_draws, variables = MODELS[name]
        with model:
            tree = pm.sample(
                n_draws, tune=1_000, chains=4, cores=1, target_accept=0.9, nuts_sampler="nutpie", random_seed=1,
                progressbar=False,
            )  # fmt: skip
        posterior = tree["posterior"].to_dataset()[variables]
        ess, rhat = az.ess(posterior), az.rhat(posterior)
        print(name, "smallest effective sample size", {v: int(x.min()) for v, x in ess.items()})
        print("largest R-hat", {v: round(float(x.max()), 4) for v, x in rhat.items()})
        print("divergences", int(tree["sample_stats"]["diverging"].sum()), flush=True)
        for variable in variables:
            draws = posterior[variable].to_numpy().reshape(4 * n_draws, -1)
            sizes = np.ravel(ess[variable].to_numpy())
            quantiles = np.quantile(draws, np.array(LEVELS) / 100, axis=0).T
            for column, size, q in zip(draws.T, sizes, quantiles, strict=True):
                rows.append([name, variable, column.mean(), column.std(ddof=1), size, *q])
    table = pd.DataFrame(rows, columns=["model", "variable", "mean", "sd", "ess", *(f"q{q:02d}" for q in LEVELS)])
    scalar = table.groupby(["model", "variable"])["mean"].transform("size") == 1
    table.loc[~scalar, [f"q{q:02d}" for q in LEVELS]] = np.nan  # of latent variables, moments are enough
    table.to_csv(HERE / "latent_nuts.csv", index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main()
