"""Natural gradients of Gaussian processes: this package beside GPJax and GPflow, kernels held.

Classifications with a logit link: Sonar and USPS with the kernels of Khan et al. (2016), whose standard deviations are
148 and 403, and two with standard deviations of 2 and 3. Every method starts at the prior and is judged by the same
-ELBO, of its q on the latent values at the points, by exact expectations. GPJax and GPflow run in processes of their
own, each in an environment that has it: ``--gpjax`` and ``--gpflow`` are their Pythons. Runs that are in the results
file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with the files that ``wide_rows.py`` names.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
.. [2] H. Salimbeni, S. Eleftheriadis and J. Hensman (2018). Natural gradients in practice: non-conjugate variational
   inference in Gaussian process models. AISTATS. https://doi.org/10.48550/arXiv.1803.09151

Examples
--------
::

    python natgrad.py --data DATA --gpjax VENV/bin/python --gpflow VENV/bin/python
"""

import argparse
import datetime
import os
import subprocess
import tempfile

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from khan_gp_data import SETTINGS, process, split
from natgrad_problem import Problem, one_core
from natgrad_tables import write_tables
from pages import write_between_marks
from records import Records
from wide_rows import followed

RESULTS = Path(__file__).parent / "results"
KEY = ("problem", "method", "variant", "nodes", "step_size")
FIELDS = (*KEY, "evaluation", "loss", "own", "cold", "warm", "status", "versions", "date", "environment")


def _of_khan(name: str) -> tuple[str, float, float, int | None]:
    setting = SETTINGS[name]
    return setting.file, float(np.exp(setting.log_length)), float(np.exp(setting.log_sd)), setting.n_train


#: Name: file, length scale, standard deviation, training rows (None: those of the file). No file: simulated.
PROBLEMS: dict[str, tuple[str | None, float, float, int | None]] = {
    **{name: _of_khan(name) for name in ("Sonar", "USPS, 3 against 5", "USPS, 2 against 4")},
    "simulated, sd 2": (None, 0.7, 2.0, 200),
    "USPS, 3 against 5, sd 3": ("usps_3vs5.csv.gz", float(np.exp(2.5)), 3.0, 767),
}
OURS = "this package"
#: Method: script, and its variants with the nodes of quadrature.
RIVALS = {
    "GPJax": ("natgrad_gpjax.py", (("whitened", 20), ("whitened", 200))),
    "GPflow": ("natgrad_gpflow.py", (("shipped", 20), ("stable", 20), ("stable", 200))),
}
STEP_SIZES = (1.0, 0.5, 0.1)


def problem_of(name: str, data: Path | None) -> Problem | None:
    """Return a problem; None if its file is not at hand."""
    file, length, sd, n = PROBLEMS[name]
    if file is None:
        rng = np.random.default_rng(5)
        x = rng.uniform(0.0, 3.0, (n, 2))
        signal = 2.0 * np.sin(3.0 * x[:, 0]) * np.cos(2.0 * x[:, 1])
        return Problem(x, np.where(rng.uniform(size=n) < 1.0 / (1.0 + np.exp(-signal)), 1.0, -1.0), length, sd)
    if data is None or not (data / file).exists():
        return None
    x, y, is_test = split(data / file, n)
    return Problem(x[~is_test], 2.0 * y[~is_test] - 1.0, length, sd)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int, float]]:
    """Return problem, method, variant, nodes and step size of all runs that can be had."""
    for name in options.problems:
        yield name, OURS, "default", 0, 0.0
        for method, (_, variants) in RIVALS.items():
            if getattr(options, method.lower()) is not None:
                yield from ((name, method, *variant, size) for variant in variants for size in STEP_SIZES)


def run_ours(file: Path) -> None:
    """Fit by default, twice, and report what the ELBO was at each evaluation, and seconds."""
    one_core()
    problem = Problem.read(file)
    sign, how = (problem.sign > 0).astype(int), (problem.length, problem.sd)
    _, cold, _ = followed(process(problem.x, sign, *how)[0])
    found, warm, approx = followed(process(problem.x, sign, *how)[0])
    own = [-elbo for elbo in found]
    # PyMC's parameters are those in which the prior is standard normal, too.
    loss = problem.loss(approx.q.mean(), np.linalg.cholesky(approx.q.cov()))
    report(own=own, loss=loss, cold=cold, warm=warm)


def measure(cell: tuple[str, str, str, int, float], problem: Problem, options: argparse.Namespace) -> list[dict]:
    """Do one run, and return its rows."""
    _, method, variant, nodes, step_size = cell
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file, out = Path(folder) / "problem.npz", Path(folder) / "out.npz"
        problem.write(file)
        if method == OURS:
            found = run_process(script(__file__, "--ours", file), Path(folder) / "compiled", 600.0)
            best = np.minimum.accumulate(found["own"])
            best[-1] = found["loss"]
            part = np.arange(1, len(best) + 1) / len(best)
            shown = {"status": found.get("status", "converged")}
            return [
                {"evaluation": i + 1, "loss": best[i], "own": found["own"][i], **shown}
                | {"cold": part[i] * found["cold"], "warm": part[i] * found["warm"]}
                for i in range(len(best))
            ]
        command = [getattr(options, method.lower()), Path(__file__).parent / RIVALS[method][0], file, out, variant]
        command += [nodes, step_size, options.steps, options.seconds]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=_alone())
        with np.load(out) as arrays:
            return list(_rows({name: arrays[name] for name in arrays}))


def _alone() -> dict[str, str]:
    """Return the environment of this process, without the packages that it adds to its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _rows(found: dict[str, np.ndarray]) -> Iterator[dict[str, object]]:
    """Return a row for each evaluation: the first is that at the prior, where the first step comes from."""
    loss, own = found["loss"], found["own"]
    # The first step of a run may have been compiled in it; the others say what a step takes.
    each = float(np.median(found["seconds"][1:])) if len(found["seconds"]) > 1 else np.nan
    failure = str(found.get("failure", ""))
    status = failure or ("not finite" if not np.isfinite(loss[-1]) else "")
    for i, value in enumerate(loss):
        cold = float(found["first"]) + (i - 1) * each if i else 0.0
        values = {"loss": float(value), "own": float(own[i]), "cold": cold, "warm": i * each}
        yield {"evaluation": i, **{k: v for k, v in values.items() if np.isfinite(v)}} | {
            "status": status,
            "versions": str(found["version"]),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--gpjax", type=Path, help="a Python that has GPJax")
    parser.add_argument("--gpflow", type=Path, help="a Python that has GPflow")
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--steps", type=int, default=200, help="steps of a rival at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor seconds of a rival's steps at most")
    parser.add_argument("--out", type=Path, default=RESULTS / "natgrad.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "natgrad.md", help="page with marks, or a new file")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ours is not None:
        run_ours(options.ours)
        return
    records = Records(options.out, FIELDS)
    done = {(*(row[name] for name in KEY[:-1]), float(row["step_size"])) for row in records.read()}
    shared = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "environment": describe_environment()}
    for cell in cells(options):
        if (*map(str, cell[:-1]), cell[-1]) in done:
            continue
        problem = problem_of(cell[0], options.data)
        if problem is None:
            print(f"{cell[0]}: left out, for there is no file of it")
            continue
        rows = measure(cell, problem, options)
        for row in rows:
            records.append(dict(zip(KEY, cell, strict=True)) | row | shared)
        print(*cell, len(rows), rows[-1], flush=True)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


if __name__ == "__main__":
    main()
