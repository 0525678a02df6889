"""What `reparam` gains on hierarchical models with NUTS references: moments, ELBO and seconds, as a Markdown table.

All fits are Gaussian ones, and run in one process, warm but for the compilation of their own graphs. From a checkout
that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python reparametrised.py --data DATA --references REFERENCES --table reparam.md
"""

import argparse
import importlib.util
import time

from pathlib import Path
from typing import Any

import numpy as np

import pymc_ngvi

MODELS = ("toenail_centred", "hers")
KINDS = (None, "noncentred", "rvb1", "rvb2")
HEADER = "| model | `reparam` | em | es | worst coordinate | ELBO | gradients | Hessians | seconds | ended |"


def main() -> None:
    """Fit each model in each way, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--references", type=Path, required=True, help="folder of models.py and NUTS moments")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seeds", type=int, default=2, help="run the seeds 1 to this")
    parser.add_argument("--table", type=Path, required=True, help="Markdown file to write")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("models", options.references / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = [HEADER, "|" + "---|" * 10]
    for name in options.models:
        reference = np.load(options.references / f"{name}.npz")
        for kind in KINDS:
            rows = [measured(module, name, options.data, reference, kind, s + 1) for s in range(options.seeds)]
            lines.append(line(name, kind, rows))
            print(lines[-1], flush=True)
            options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(module: Any, name: str, data: Path, reference: Any, kind: str | None, seed: int) -> dict[str, Any]:
    """Return the figures of one fit."""
    model = getattr(module, name)(data)
    start = time.perf_counter()
    approx = pymc_ngvi.fit_ngvi(model=model, reparam=kind, posterior="gaussian", random_seed=seed, progressbar=False)
    seconds = time.perf_counter() - start
    errors = (approx.mean_flat - reference["uncon_mean"]) / reference["uncon_sd"]
    worst = int(np.argmax(np.abs(errors)))
    return {
        "em": np.sqrt(np.mean(errors**2)),
        "es": np.sqrt(np.mean((approx.sd_flat / reference["uncon_sd"] - 1.0) ** 2)),
        "worst": f"`{approx.layout.label(worst)}` {errors[worst]:+.2f}",
        "elbo": approx.elbo.value,
        "n_gradients": approx.n_gradients,
        "n_hessians": approx.n_hessians,
        "seconds": seconds,
        "status": str(approx.status),
    }


def line(name: str, kind: str | None, rows: list[dict[str, Any]]) -> str:
    """Return the row of the table: means over seeds, the worst coordinate of the first."""
    mean = {key: np.mean([row[key] for row in rows]) for key in rows[0] if key not in ("worst", "status")}
    ended = ", ".join(sorted({row["status"] for row in rows}))
    what = f"`{kind!r}`".replace("'", '"') if kind else "-"
    return (
        f"| {name} | {what} | {mean['em']:.3f} | {mean['es']:.3f} | {rows[0]['worst']} | {mean['elbo']:,.2f} "
        f"| {mean['n_gradients']:,.0f} | {mean['n_hessians']:,.0f} | {mean['seconds']:.1f} | {ended} |"
    )


if __name__ == "__main__":
    main()
