"""Steps on stored sites, two numbers a row: PG-SVI of Khan et al. (2016) and steps that replace the sites of a batch.

Classification of the Sonar data by a Gaussian process, with the kernel, the batches of 5 and the step size of the
paper. Expectations are exact, where the paper takes draws. The three rules differ in what a step does:

- as printed (equation 19, with A_k in the mean): all sites fade, those of the batch are added to;
- the exact proximal step (B_k in the mean), with the same precisions;
- incremental: the sites of the batch go part of the way to where they would be now, and all others stay.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146

Examples
--------
::

    python site_steps.py --data DATA --table tests/benchmarks/results/site_steps.md
"""

import argparse

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from environment import today_and_here
from measure import Array
from pages import measured_on, table, write_between_marks
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import expit, log_expit

#: Logs of length scale and amplitude; nugget, batch and beta times the number of rows, of the authors' code.
LOG_LENGTH, LOG_AMPLITUDE, NUGGET, BATCH, BETA_N, SEED = -1.0, 6.0, 1e-4, 5, 0.2, 5
#: -ELBO of the optimum; passes at which it is reported; parts of the way of incremental steps.
OPTIMUM, PASSES, PARTS = 156.2143, (1, 2, 4, 9, 20, 50), (0.1, 0.3, 1.0)
#: Trapezoidal rule of a spacing that is fine for a likelihood of scale 1 under standard deviations up to 403.
NODES = np.linspace(-9.0, 9.0, 7_201)
WEIGHTS = np.exp(-0.5 * NODES**2) / np.exp(-0.5 * NODES**2).sum()


def read(data: Path) -> tuple[Array, Array]:
    """Return the kernel matrix of the rows that are fitted, and their signs."""
    frame = pd.read_csv(data / "sonar.csv")
    frame = frame[frame["is_test"] == 0]
    x = frame.drop(columns=["y", "is_test"]).to_numpy(dtype=float)
    squared = ((x[:, None] - x) ** 2).sum(axis=-1)
    kernel = np.exp(2 * LOG_AMPLITUDE - 0.5 * squared / np.exp(2 * LOG_LENGTH)) + NUGGET * np.eye(len(x))
    return kernel, 2.0 * frame["y"].to_numpy() - 1.0


def expected(sign: Array, mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Return E log p, E of its slope and of minus its curvature, (n,) each."""
    f = sign[:, None] * (mean[:, None] + np.sqrt(variance)[:, None] * NODES)
    return log_expit(f) @ WEIGHTS, sign * (expit(-f) @ WEIGHTS), (expit(f) * expit(-f)) @ WEIGHTS


def posterior(kernel: Array, linear: Array, precision: Array) -> tuple[Array, Array, Array]:
    """Return mean and covariance of the prior times sites, and the Cholesky factor of I + s K s."""
    root = np.sqrt(precision)
    factor = np.linalg.cholesky(np.eye(len(kernel)) + root[:, None] * kernel * root)
    half = solve_triangular(factor, root[:, None] * kernel, lower=True)
    cov = kernel - half.T @ half
    return cov @ linear, cov, factor


def loss(kernel: Array, sign: Array, mean: Array, precision: Array) -> float:
    """Return -ELBO of a mean, and of the covariance that sites have."""
    _, cov, factor = posterior(kernel, np.zeros(len(kernel)), precision)
    inverse = solve_triangular(factor, np.eye(len(kernel)), lower=True)
    divergence = 2 * np.log(np.diag(factor)).sum() + (inverse**2).sum() - len(kernel)
    divergence += mean @ cho_solve(cho_factor(kernel), mean)
    return float(0.5 * divergence - expected(sign, mean, np.diag(cov))[0].sum())


def batches(n: int) -> Iterator[list[Array]]:
    """Return the batches of pass after pass, each a random order of all rows."""
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(n)
        yield [order[start : start + BATCH] for start in range(0, n, BATCH)]


def proximal(kernel: Array, sign: Array, *, exact: bool) -> Iterator[tuple[Array, Array]]:
    """Return mean and precisions of sites after each pass of PG-SVI: as printed, or by exact proximal steps."""
    n = len(sign)
    r = 1.0 / (1.0 + BETA_N / n)
    mean, variance, precision, of_kernel = np.zeros(n), np.diag(kernel), np.zeros(n), cho_factor(kernel)
    for batch_list in batches(n):
        for rows in batch_list:
            scale = n / len(rows)
            _, alpha, gamma = expected(sign[rows], mean[rows], variance[rows])
            faded = r * precision
            precision = faded.copy()
            precision[rows] += (1.0 - r) * scale * gamma
            _, cov, _ = posterior(kernel, np.zeros(n), faded if exact else precision)
            # I - K A^-1 is the covariance times K^-1; the step in the mean is along m - scale K alpha.
            step = cho_solve(of_kernel, mean)
            step[rows] -= scale * alpha
            mean = mean - (1.0 - r) * cov @ step
            variance = np.diag(posterior(kernel, np.zeros(n), precision)[1] if exact else cov)
        yield mean, precision


def incremental(kernel: Array, sign: Array, *, part: float) -> Iterator[tuple[Array, Array]]:
    """Return mean and precisions of sites after each pass of steps that replace the sites of a batch."""
    n = len(sign)
    linear, precision = np.zeros(n), np.zeros(n)
    mean, variance = np.zeros(n), np.diag(kernel)
    for batch_list in batches(n):
        for rows in batch_list:
            _, alpha, gamma = expected(sign[rows], mean[rows], variance[rows])
            linear[rows] += part * (alpha + gamma * mean[rows] - linear[rows])
            precision[rows] += part * (gamma - precision[rows])
            mean, cov, _ = posterior(kernel, linear, precision)
            variance = np.diag(cov)
        yield mean, precision


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args(arguments)
    kernel, sign = read(given.data)
    rules = {
        "as printed": proximal(kernel, sign, exact=False),
        "exact proximal step": proximal(kernel, sign, exact=True),
        **{f"incremental, {part:g} of the way": incremental(kernel, sign, part=part) for part in PARTS},
    }
    header, lines = ["steps", *(f"{n} passes" if n > 1 else "1 pass" for n in PASSES)], []
    for name, rule in rules.items():
        found = {}
        for number in range(1, PASSES[-1] + 1):
            mean, precision = next(rule)
            if number in PASSES:
                found[number] = loss(kernel, sign, mean, precision) - OPTIMUM
        lines.append([name, *(f"{found[n]:.3g}" for n in PASSES)])
        print(*table(header, lines[-1:]), sep="\n", flush=True)
    if given.table is not None:
        measured = today_and_here()
        text = [*measured_on([measured]), *table(header, lines)]
        write_between_marks(given.table, "\n".join(text) + "\n", "site_steps.py")


if __name__ == "__main__":
    main()
