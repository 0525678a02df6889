"""Networks with a dense covariance for each layer, beside independent weights and one dense covariance.

The networks and data of `vogn`. Fits are those of one word, ``estimator="gauss_newton"``, with each family. From a
checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python layers.py run --data DIR --runs DIR --family block --seed 1
    python layers.py pages --runs DIR --out tests/benchmarks/results
"""

import argparse
import json
import time
import warnings

from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from pages import table, write_between_marks
from vogn import DATA, N_UNITS, load, network
from vogn_baselines import Network, losses

import pymc_ngvi

from pymc_ngvi.density import LogDensity

#: Draws of predictions, and of the ELBO on all rows.
N_PREDICTIVE, N_ELBO = 200, 2_000
FAMILIES = ("diagonal", "block", "full")


def run(data: Path, runs: Path, name: str, family: str, seed: int) -> None:
    """Fit, and save what came of it."""
    (x, y), test = load(data, name)
    began = time.process_time()
    with network(x, y), warnings.catch_warnings():
        warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)
        approx = pm.fit(
            method="ngvi", estimator="gauss_newton", family=family, random_seed=seed, progressbar=False, backend="quick"
        )
    seconds = time.process_time() - began
    rng, layers = np.random.default_rng(seed), Network(x.shape[1], N_UNITS)
    draws = approx.draw_flat(N_PREDICTIVE, rng)
    by_rows, together, accuracy = losses(layers.logits(draws, test[0])[0], test[1])
    found = {
        "data": name, "family": family, "seed": seed, "seconds": seconds, "iterations": approx.n_iterations,
        "elbo": elbo(approx, network(x, y, None), rng), "by_rows": by_rows, "together": together,
        "accuracy": accuracy, "gap": approx.gap, "status": str(approx.status), "environment": describe_environment(),
    }  # fmt: skip
    runs.mkdir(parents=True, exist_ok=True)
    (runs / f"{name}-{family}-{seed}.json").write_text(json.dumps(found), encoding="utf-8")
    print({key: value for key, value in found.items() if key != "environment"}, flush=True)


def elbo(approx: Any, of_all: pm.Model, rng: np.random.Generator) -> float:
    """Return the ELBO on all rows."""
    density, theta = LogDensity(of_all, "quick"), approx.draw_flat(N_ELBO, rng)
    logp = np.concatenate([density.logp_grad(part)[0] for part in np.array_split(theta, 20)])
    return float(np.mean(logp - approx.q.log_density(theta)))


def pages(runs: Path, out: Path) -> None:
    """Write the table of the page."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(runs.glob("*.json"))]
    lines = [f"Measured on: {'; '.join(dict.fromkeys(row['environment'] for row in found))}, one thread.", ""]
    cells = []
    for name, family in ((name, family) for name in DATA for family in FAMILIES):
        rows = [row for row in found if (row["data"], row["family"]) == (name, family)]
        if not rows:
            continue

        def of(key: str, digits: str, rows: list[dict[str, Any]] = rows) -> str:
            values = [row[key] for row in rows]
            spread = f" [{min(values):{digits}}, {max(values):{digits}}]" if len(values) > 1 else ""
            return f"{np.median(values):{digits}}{spread}"

        cells.append(
            [DATA[name], f"`{family}`", f"{len(rows)}", of("elbo", ".1f"), of("by_rows", ".3f"),
             of("together", ".3f"), of("accuracy", ".3f"), of("iterations", ",.0f"), of("seconds", ",.0f")]
        )  # fmt: skip
    head = ["data", "family", "seeds", "ELBO", "loss, by rows", "loss, together", "accuracy", "iterations", "s"]
    write_between_marks(out / "layers.md", "\n".join([*lines, *table(head, cells)]) + "\n", "layers.py")


def main() -> None:
    """Run, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "pages"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", choices=list(DATA), default="australian")
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.what == "run":
        run(chosen.data, chosen.runs, chosen.name, chosen.family, chosen.seed)
    else:
        pages(chosen.runs, chosen.out)


if __name__ == "__main__":
    main()
