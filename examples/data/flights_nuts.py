"""Make ``flights_nuts.csv``: scales of the sample of 20,000 flights in ``09_three_million_flights`` by NUTS.

Needs nutpie (``pip install nutpie``), the flights themselves in the folder that the environment variable ``FLIGHTS``
names, and some minutes. Prints what the diagnostics of the sampler say.
"""

import os
import sys

from pathlib import Path

import arviz as az
import pandas as pd
import pymc as pm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from notebooks import read_cells  # noqa: E402


def few_flights():
    """Return the model of the sample: cells of the notebook that begin with "# The "."""
    code = [text for kind, text in read_cells(HERE.parent / "09_three_million_flights.py") if kind == "code"]
    scope = {}
    os.chdir(HERE.parent)
    for text in code:
        if text is code[0] or text.startswith("# The "):
            exec(compile(text, "09_three_million_flights", "exec"), scope)
    return scope["model_of"](pd.concat([scope["sample"](part, None) for part in range(10)]))


def main():
    """Sample, summarise, write."""
    with few_flights():
        tree = pm.sample(
            2_000, tune=1_000, chains=4, cores=1, target_accept=0.9, nuts_sampler="nutpie", random_seed=1,
            progressbar=False,
        )  # fmt: skip
    posterior = tree["posterior"].to_dataset()[["level", "slope", "sd"]]
    ess, rhat = az.ess(posterior), az.rhat(posterior)
    print("largest R-hat", {v: round(float(x.max()), 4) for v, x in rhat.items()})
    print("divergences", int(tree["sample_stats"]["diverging"].sum()), flush=True)
    rows = [[v, float(posterior[v].mean()), float(posterior[v].std()), float(ess[v])] for v in ("level", "slope")]
    for of in posterior["of"].to_numpy():
        draws = posterior["sd"].sel(of=of)
        rows.append([of, float(draws.mean()), float(draws.std()), float(ess["sd"].sel(of=of))])
    table = pd.DataFrame(rows, columns=["variable", "mean", "sd", "ess"])
    table.to_csv(HERE / "flights_nuts.csv", index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main()
