"""A network of 19,885 weights on the 60,000 images of MNIST: VOGN and IVON in PyMC, beside PyTorch.

Each run is a process of its own, with one thread. Those of ivon-opt and Adam are made by `networks_torch.py`, in an
environment with torch and ivon-opt. The page is made of what is there. From a checkout that is not installed, set
``PYTHONPATH`` to its root.

Examples
--------
::

    OPENBLAS_NUM_THREADS=1 python networks.py run --data DIR --runs DIR --method IVON --batch 128
    OPENBLAS_NUM_THREADS=1 python networks_torch.py --data DIR --runs DIR --method ivon-opt --batch 128
    python networks.py pages --runs DIR --out tests/benchmarks/results
"""

import argparse
import json
import resource
import time
import warnings

from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from networks_data import N_IN, N_OUT, N_PREDICTIVE, N_UNITS, SHOWN, Array, Clock, elbo, measures, read, save, start
from pages import table, write_between_marks

import pymc_ngvi

#: Options of the methods of the package.
METHODS: dict[str, dict[str, Any]] = {
    "VOGN": {"estimator": "gauss_newton", "step": "decay"},
    "VOGN-IVON": {"estimator": "gauss_newton", "step": "ivon"},
    "IVON": {"step": "ivon"},
}
#: Methods in the order of the tables, as people know them.
NAMES = {
    "VOGN": '`estimator="gauss_newton", step="decay"`',
    "VOGN-IVON": '`estimator="gauss_newton", step="ivon"`',
    "IVON": '`step="ivon"`',
    "ivon-opt": "ivon-opt, PyTorch",
    "Adam": "Adam, PyTorch",
}


def network(x: Array, y: Array, batch: int, link: str) -> pm.Model:
    """Return the model, with logits or with probabilities by softmax; its variables are in the order of `SHAPES`."""
    rows, digits = pm.Minibatch(x, y, batch_size=batch)
    with pm.Model() as model:
        w1, b1 = pm.Normal("w1", 0, 1, shape=(N_IN, N_UNITS)), pm.Normal("b1", 0, 1, shape=N_UNITS)
        w2, b2 = pm.Normal("w2", 0, 1, shape=(N_UNITS, N_OUT)), pm.Normal("b2", 0, 1, shape=N_OUT)
        hidden = pm.math.maximum(pm.math.dot(rows, w1) + b1, 0.0)
        logits = pm.math.dot(hidden, w2) + b2
        given = {"logit_p": logits} if link == "logit_p" else {"p": pm.math.softmax(logits, axis=-1)}
        pm.Categorical("y", **given, observed=digits, total_size=len(y))
    return model


def run(data: Path, runs: Path, method: str, batch: int, link: str, passes: int, seed: int) -> None:
    """Fit, and save what came of it."""
    clock, began = Clock(), time.process_time()
    x, y = read(data, "train")
    x_test, y_test = read(data, "t10k")
    clock.leave_out(began)
    rng, seconds, found = np.random.default_rng(seed), [], {}
    shown = {-(-len(y) * which // batch): which for which in SHOWN}

    def look(approx: Any, losses: object, iteration: int) -> None:
        since = time.process_time()
        seconds.append(clock.seconds())
        if iteration in shown:
            q = approx.groups[0].current_state()
            draws = q.draws(rng.standard_normal((N_PREDICTIVE, q.n_dim)))
            found[shown[iteration]] = measures(draws, x_test, y_test)
        clock.leave_out(since)

    model = network(x, y, batch, link)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)
        approx = pymc_ngvi.fit_ngvi(
            -(-passes * len(y) // batch), model=model, random_seed=seed, start=start(seed), callbacks=[look],
            progressbar=False, **METHODS[method],
        )  # fmt: skip
    q = approx.groups[0].current_state()
    a_pass = (seconds[-1] - seconds[0]) / (len(seconds) - 1) * len(y) / batch
    save(
        runs, f"{method}-{link}-{batch}-{seed}", method=method, batch=batch, link=link, first=seconds[0], a_pass=a_pass,
        found=found, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, status=str(approx.status),
        elbo=elbo(q.mean(), q.sd(), x, y), sd=float(np.median(q.sd())),
        backend=approx.record.backend, environment=describe_environment(),
    )  # fmt: skip


def pages(runs: Path, out: Path) -> None:
    """Write the tables of the page."""
    found = [json.loads(file.read_text()) for file in sorted(runs.glob("*.json"))]
    order = list(NAMES)
    found.sort(key=lambda row: (row["batch"], order.index(row["method"]), row.get("link", "")))
    environments = dict.fromkeys(row["environment"] for row in found)
    whole = [row for row in found if len(row["found"]) == len(SHOWN)]
    lines = [
        f"Measured on: {'; '.join(environments)}. One thread.",
        "",
        "Predictions, after passes through the data:",
        "",
    ]
    head = [f"{what}, {n}" for what in ("accuracy", "log loss", "calibration error") for n in SHOWN]
    lines += table(["method", "batch", *head, "ELBO", "median sd"], [_figures(row) for row in whole])
    lines += ["", "Cost:", ""]
    head = ["method", "batch", "first iteration, s", "a pass, s", "memory, MB"]
    lines += table(head, [[*_name(row), *_seconds(row), f"{row['memory']:.0f}"] for row in whole])
    lines += ["", "As users write the likelihood, batches of 128:", ""]
    linked = [row for row in found if row["method"] in METHODS and row["batch"] == 128]
    head = ["method", "likelihood", "first iteration, s", "a pass, s"]
    lines += table(head, [[_name(row)[0], _LINKS[row["link"]], *_seconds(row)] for row in linked])
    write_between_marks(out / "networks.md", "\n".join(lines) + "\n", "networks.py")


_LINKS = {"logit_p": "`logit_p`", "p": "`p`, by softmax"}


def _name(row: dict[str, Any]) -> list[str]:
    options = "".join(f", {name}={value:g}" for name, value in row.get("set_by_hand", {}).items())
    return [NAMES[row["method"]] + options, f"{row['batch']}"]


def _seconds(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:.1f}" for name in ("first", "a_pass")]


def _figures(row: dict[str, Any]) -> list[str]:
    forms = {"accuracy": ".4f", "loss": ".3f", "calibration": ".3f"}
    cells = [format(row["found"][str(n)][what], form) for what, form in forms.items() for n in SHOWN]
    of_q = [f"{row['elbo']:,.0f}", f"{row['sd']:.3f}"] if "elbo" in row else ["-", "-"]
    return [*_name(row), *cells, *of_q]


def main() -> None:
    """Run, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "pages"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--method", choices=list(METHODS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--link", choices=["logit_p", "p"], default="logit_p")
    parser.add_argument("--passes", type=int, default=max(SHOWN))
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.what == "pages":
        pages(chosen.runs, chosen.out)
    else:
        run(chosen.data, chosen.runs, chosen.method, chosen.batch, chosen.link, chosen.passes, chosen.seed)


if __name__ == "__main__":
    main()
