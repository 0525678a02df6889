"""Measures the primitive costs behind all estimates, and prints the constants of `pymc_ngvi/core/prices.py`.

``python tests/benchmarks/cost_model.py`` takes half a minute on one thread, and prints each constant beside the one in
use. Processor seconds, the least of some repetitions; constants are fitted to relative errors, all at least 0. No fit
reads a clock: estimates are the same on any machine, and these constants are how they come to be seconds.
"""

import functools
import time

import numpy as np
import pymc as pm

from scipy import optimize, sparse

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState, SparseFamily
from pymc_ngvi.families.sparse import SparseStructure, find_blocks, step_seconds, structure_of

N_STEPS = 6
#: Entries of an arrow beyond which its step is not measured.
MOST_ENTRIES = 3_000_000


class Known:
    """Minus a precision as a mean Hessian."""

    def __init__(self, matrix):
        self.pattern = Pattern.of(matrix)
        self._values = -np.asarray(matrix.tocsr()[self.pattern.rows, self.pattern.cols]).ravel()

    def values(self):
        return self._values


# --- patterns ---------------------------------------------------------------------------------------------------------


def chain(n):
    return sparse.diags_array([-np.ones(n - 1), np.full(n, 2.1), -np.ones(n - 1)], offsets=[-1, 0, 1]).tocsr()


def lattice(side):
    one, path = sparse.eye_array(side), chain(side)
    return (sparse.kron(path, one) + sparse.kron(one, path)).tocsr()


def crossed(n, first, second):
    rng = np.random.default_rng(1)
    levels = np.concatenate([rng.integers(first, size=n), first + rng.integers(second, size=n)])
    rows = sparse.csr_array((np.ones(2 * n), (np.tile(np.arange(n), 2), levels)), shape=(n, first + second))
    return (rows.T @ rows + 3.0 * sparse.eye_array(first + second)).tocsr()


def groups(sizes, border):
    """Blocks beside a border that touches all."""
    blocks = sparse.block_diag([sparse.csr_array(np.full((k, k), 0.1) + np.eye(k)) for k in sizes])
    n = blocks.shape[0]
    side = sparse.csr_array(np.full((n, border), 0.01))
    return sparse.block_array([[blocks, side], [side.T, sparse.csr_array(np.eye(border) * (n + 1.0))]]).tocsr()


PATTERNS = {
    **{f"chain of {n:,}": lambda n=n: chain(n) for n in (200, 1_000, 10_000)},
    **{f"lattice of side {n}": lambda n=n: lattice(n) for n in (15, 30, 60)},
    "crossed, 300 x 30": lambda: crossed(5_000, 300, 30),
    "crossed, 1,000 x 300": lambda: crossed(9_000, 1_000, 300),
    "60 groups of 2, 8 beside": lambda: groups([2] * 60, 8),
    "300 groups of 1, 10 beside": lambda: groups([1] * 300, 10),
    "3,000 groups of 3, 20 beside": lambda: groups([3] * 3_000, 20),
    "40 groups of 1 to 8, 6 beside": lambda: groups([1 + i % 8 for i in range(40)], 6),
    "20 groups of 30, 50 beside": lambda: groups([30] * 20, 50),
}


# --- linear algebra ---------------------------------------------------------------------------------------------------


def least(call, n=N_STEPS):
    """Return the least processor seconds of some calls."""
    call()
    found = []
    for _ in range(n):
        start, count = time.process_time(), 0
        while count < 1 or time.process_time() - start < 0.02:
            call()
            count += 1
        found.append((time.process_time() - start) / count)
    return min(found)


def of_step(structure, hessian):
    """Return what the linear algebra of one step takes, covariances of the pattern included."""
    n, pattern = hessian.pattern.n_dim, hessian.pattern
    q = SparseFamily(structure).from_scale(np.zeros(n), np.ones(n))

    def step():
        curvature = q.curvature(hessian)
        q.add_to_diagonal(curvature, -1.0).ravel()
        new, _ = q.precision_scaled_by(q.add_to_diagonal(0.5 * curvature, 0.5), np.ones(n))
        new.covariances(pattern.rows, pattern.cols)

    return least(step)


def of_dense_step(n):
    precision = np.full((n, n), 0.1) + np.eye(n)
    q = FullState(np.zeros(n), np.eye(n))

    def step():
        new, _ = q.precision_scaled_by(precision, np.ones(n))
        new.cov()

    return least(step, 3)


def fitted(features, seconds):
    """Return costs of features, at least 0, from seconds to relative errors; and the largest ratio that is left."""
    features, seconds = np.asarray(features, dtype=float), np.asarray(seconds)
    found = optimize.nnls(features / seconds[:, None], np.ones(len(seconds)))[0]
    return found, np.exp(np.abs(np.log(features @ found / seconds)).max())


def said(names, costs):
    for name, cost in zip(names, costs, strict=True):
        print(f"{name} = {cost:.2g}  # in use: {getattr(prices, name):.2g}", flush=True)


def linear_algebra():
    """Steps with blocks beside a border, with fronts, and dense ones."""
    of_blocks, of_fronts = [], []
    for name, make in PATTERNS.items():
        hessian = Known(make())
        arrow, filled = find_blocks(hessian.pattern), SparseStructure.of(hessian.pattern)
        seconds = of_step(filled, hessian)
        of_fronts.append(([filled.n_products, filled.n_fronts, 1.0], seconds))
        text = f"# {name}: fronts {1e3 * seconds:.2f} ms (estimated {1e3 * step_seconds(filled):.2f})"
        if arrow.pattern.n_entries < MOST_ENTRIES:
            seconds = of_step(structure_of(arrow), hessian)
            of_blocks.append((prices.parts_of_blocks(arrow.sizes, len(arrow.border)), seconds))
            text += f", blocks {1e3 * seconds:.2f} ms ({1e3 * step_seconds(arrow):.2f})"
        print(text, flush=True)
    for names, found in (
        (("PER_PRODUCT", "PER_ENTRY", "OF_STEP"), of_fronts),
        (("PER_PRODUCT", "PER_ENTRY_OF_BLOCKS", "PER_SIZE"), of_blocks),
    ):
        costs, ratio = fitted(*map(list, zip(*found, strict=True)))
        said(names, costs)
        print(f"# within a factor of {ratio:.2f}")
    said(["PER_DENSE"], [of_dense_step(1_000) / 1e9])


# --- evaluations ------------------------------------------------------------------------------------------------------


def glmm(n_rows, n_groups=50):
    rng = np.random.default_rng(1)
    group, x = rng.integers(n_groups, size=n_rows), rng.normal(size=n_rows)
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 2, shape=2), pm.HalfNormal("s", 1)
        z = pm.Normal("z", 0, 1, shape=n_groups)
        pm.Bernoulli("y", logit_p=b[0] + b[1] * x + s * z[group], observed=rng.integers(2, size=n_rows))
    return model


def evaluations():
    """Expectations over rows and values of log p, by numbers of rows; what they are of a gradient's price."""
    expectations, values, of_gradient = [], [], []
    for n_rows in (300, 3_000, 30_000):
        density = LogDensity(glmm(n_rows))
        n = density.n_dim
        q = FullState(np.zeros(n), 0.3 * np.eye(n))
        rules = density.expected(q).rules
        theta = q.draws(np.random.default_rng(1).standard_normal((64, n)))
        expectations.append(least(functools.partial(density.expected, q, rules)))
        values.append(least(functools.partial(density.logp, theta)) / len(theta))
        of_gradient.append(expectations[-1] / density.gradient_seconds)
        print(f"# {n_rows:,} rows: expectation {1e3 * expectations[-1]:.2f} ms, log p {1e3 * values[-1]:.3f} ms")
    said(
        ["PER_ROW_OF_VALUE", "OF_EXPECTATION"],
        [values[-1] / 30_000, np.median(of_gradient)],
    )


if __name__ == "__main__":
    linear_algebra()
    evaluations()
