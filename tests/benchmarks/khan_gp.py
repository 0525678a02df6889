"""Gaussian processes for classification, by PG-SVI and by gradients, as in section 7.1 of Khan et al. (2016).

Sonar, USPS 2 against 4 and USPS 3 against 5, with the kernels, batches and step sizes of the paper. Three questions:
where is the optimum, and how well does it predict; how do -ELBO and test log loss fall by pass (figure 2); and how
much do proximal steps and gradient descent depend on the step size (figure 1, here on Sonar). Expectations are exact,
where the paper takes draws: sigma(f) is written as a mixture of normal distribution functions. Runs that are in the
results file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with the files that ``wide_rows.py`` names.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146

Examples
--------
::

    python khan_gp.py --data DATA
"""

import argparse
import time

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pymc as pm

from environment import today_and_here
from khan_gp_data import NUGGET, SETTINGS, process
from khan_gp_methods import Problem, Q, descent, proximal, read, rivals, sgd
from khan_gp_pages import ARRIVED, draw, tables
from pages import write_between_marks
from records import FIGURES, RESULTS, Records
from scipy.special import expit

from pymc_ngvi import fit_ngvi

FIELDS = ("data", "figure", "method", "step_size", "pass", "loss", "log_loss", "sites_loss", "sites_log_loss")
FIELDS += ("seconds", "date", "environment")
#: -ELBO from which a run has diverged.
DIVERGED = 1e8
#: Passes after which a run of figure 2 is scored.
SCORED = {*range(1, 21), *np.geomspace(20, 10_000, 60).round().astype(int).tolist()}
DESCENT_PASSES = 2_000
#: How gradients are taken: as the paper writes, with logs of the diagonal of the factor, and as the authors' code does.
VARIANTS = {
    "": {"logs": False, "weighted": True},
    ", logs": {"logs": True, "weighted": True},
    ", as in the code": {"logs": True, "weighted": False},
}


class Runs:
    """What has been run, and what is to be."""

    def __init__(self, path: Path) -> None:
        self.records = Records(path, FIELDS)
        self.shared = today_and_here()
        self.done = {tuple(row[name] for name in FIELDS[:4]) for row in self.records.read()}

    def run(
        self, key: tuple[str, str, str, str], steps: Iterator[Q], n: int, problem: Problem, best: float = -np.inf
    ) -> None:
        """Run for some passes; of a search for a step size, keep when a run arrives, and its end."""
        if key in self.done:
            return
        start, rows, targets = time.process_time(), [], list(ARRIVED)
        with np.errstate(all="ignore"):
            for number, q in enumerate(steps, start=1):
                if key[1] == "2" and number not in SCORED and number < n:
                    continue
                loss = problem.loss(*q) if all(np.all(np.isfinite(part)) for part in q) else np.inf
                arrived = loss < best + targets[0]
                if arrived and key[1] == "1":
                    targets = [target for target in targets if not loss < best + target]
                ended = number == n or not loss < DIVERGED or not targets
                row: dict[str, object] = {"pass": number, "loss": loss}
                if key[1] == "2" and loss < DIVERGED:
                    sited = (q[0], problem.of_sites(*q))
                    row |= {"log_loss": problem.log_loss(*q), "sites_loss": problem.loss(*sited)}
                    row |= {"sites_log_loss": problem.log_loss(*sited)}
                if key[1] == "2" or arrived or ended:
                    rows.append(row)
                if ended:
                    break
        self.keep(key, rows, round(time.process_time() - start, 2))

    def keep(self, key: tuple[str, str, str, str], rows: list[dict[str, object]], seconds: float) -> None:
        """Keep what was found."""
        for row in rows:
            self.records.append(dict(zip(FIELDS[:4], key, strict=True)) | row | {"seconds": seconds} | self.shared)
        print(*key, rows[-1], f"{seconds} s", flush=True)


def figure_two_optimum(problem: Problem, name: str, runs: Runs) -> None:
    """Fit by default, and predict: in closed form, and of Sonar by PyMC's posterior predictive as well."""
    keys = [(name, "2", "optimum", ""), (name, "2", "optimum, by draws", "")]
    if keys[0] in runs.done:
        return
    start, setting = time.process_time(), problem.setting
    y = (problem.sign > 0).astype(int)
    model, gp = process(problem.x, y, np.exp(setting.log_length), np.exp(setting.log_sd))
    approx = fit_ngvi(model=model, posterior="gaussian", random_seed=1, progressbar=False)
    seconds = round(time.process_time() - start, 2)
    factor = np.linalg.cholesky(problem.kernel)  # PyMC's parameters are factor^-1 f
    half = factor @ np.linalg.cholesky(approx.q.cov())
    q = factor @ approx.q.mean(), half @ half.T
    row: dict[str, object] = {"pass": 0, "loss": problem.loss(*q)}
    runs.keep(keys[0], [row | {"log_loss": problem.log_loss(*q)}], seconds)
    if len(problem.sign_test) > 100:  # a draw of n test rows takes a factorisation of an n x n matrix
        return
    trace = approx.sample(20_000, random_seed=1)
    with model:
        gp.conditional("f_test", problem.x_test, jitter=NUGGET)
    draws = pm.sample_posterior_predictive(trace, model=model, var_names=["f_test"], random_seed=2, progressbar=False)
    f_test = draws["posterior_predictive"]["f_test"].to_numpy().reshape(-1, len(problem.sign_test))
    log_loss = -np.log2(expit(problem.sign_test * f_test).mean(axis=0)).mean()
    runs.keep(keys[1], [row | {"log_loss": float(log_loss)}], 0.0)


def figure_two(problem: Problem, name: str, runs: Runs) -> None:
    """Run PG-SVI and its rivals with the settings of the paper."""
    beta, limits = problem.setting.beta_n / len(problem.sign), problem.setting.passes
    runs.run((name, "2", "start", ""), iter([(np.zeros(len(problem.sign)), problem.kernel)]), 1, problem)
    figure_two_optimum(problem, name, runs)
    runs.run((name, "2", "PG-SVI", f"{beta:.3g}"), proximal(problem, beta), limits[0], problem)
    for variant, how in VARIANTS.items():
        if variant and name != "Sonar":
            continue
        for rival, (size, rule) in rivals(problem).items():
            key = (name, "2", rival + variant, f"{size:.3g}")
            runs.run(key, descent(problem, rule, **how), limits[1], problem)


def figure_one(problem: Problem, name: str, runs: Runs) -> None:
    """Run proximal steps and gradient descent with step sizes of all magnitudes."""
    rows = [row for row in runs.records.read() if row["data"] == name and row["method"] == "optimum"]
    best = float(rows[0]["loss"])
    for power in np.arange(-4.0, 5.01, 0.5):
        size = 10.0**power
        key = f"{size:.3g}"
        if power <= 0.0:
            steps = descent(problem, sgd(size), whole=True, logs=True)
            runs.run((name, "1", "GD, logs of the diagonal", key), steps, DESCENT_PASSES, problem, best)
        if power >= 0.0:
            steps = descent(problem, sgd(size), whole=True)
            runs.run((name, "1", "GD", key), steps, DESCENT_PASSES, problem, best)
        if -3.0 <= power <= 2.0:
            runs.run((name, "1", "PG (CVI), all rows", key), proximal(problem, size, whole=True), 500, problem, best)
        if power <= 0.0:
            runs.run((name, "1", "PG-SVI", key), proximal(problem, size), 200, problem, best)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw the figures and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv and tables")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    runs = Runs(options.out / "khan2016.csv")
    for name in options.sets:
        if not (options.data / SETTINGS[name].file).exists():
            print(f"{name}: left out, for there is no {SETTINGS[name].file} in {options.data}")
            continue
        problem = read(options.data, name)
        figure_two(problem, name, runs)
        if name == "Sonar":
            figure_one(problem, name, runs)
    rows = runs.records.read()
    write_between_marks(options.out / "khan2016.md", tables(rows), Path(__file__).name)
    draw(rows, options.figures)


if __name__ == "__main__":
    main()
