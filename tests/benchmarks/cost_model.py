"""Measures the primitive costs behind all estimates, and prints the constants of `pymc_ngvi/core/prices.py`.

``python tests/benchmarks/cost_model.py`` takes about two minutes on one thread, and prints each constant beside the one
in use. Processor seconds, the least of some repetitions; constants are fitted to relative errors, all at least 0. No fit
reads a clock: estimates are the same on any machine, and these constants are how they come to be seconds.
"""

import time

import numpy as np

from scipy import optimize, sparse

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import FullState, SparseFamily
from pymc_ngvi.families.dissection import find_structure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure

N_STEPS = 6


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
    blocks = sparse.block_diag([np.full((k, k), 0.1) + np.eye(k) for k in sizes])
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
        q.flat(q.curvature_error(curvature))
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


def linear_algebra():
    of_blocks, of_fronts, rows = [], [], []
    for name, make in PATTERNS.items():
        hessian = Known(make())
        arrow, filled = find_structure(hessian.pattern), FilledStructure.of(hessian.pattern)
        seconds = [of_step(filled, hessian), np.nan]
        of_fronts.append(([filled.fronts.n_products, filled.fronts.n_fronts, filled.fronts.n_stacks], seconds[0]))
        if arrow.n_lower(arrow.n_dim) < 3_000_000:
            seconds[1] = of_step(arrow, hessian)
            of_blocks.append((prices.parts_of_blocks(arrow.sizes, arrow.n_border), seconds[1]))
        rows.append((name, *seconds, *of_fronts[-1][0], *prices.parts_of_blocks(arrow.sizes, arrow.n_border)))
        print(name, *(f"{x:.3g}" for x in rows[-1][1:]), flush=True)
    for names, found in (
        (("PER_PRODUCT", "PER_ENTRY", "PER_STACK"), of_fronts), (("PER_PRODUCT", "PER_ENTRY", "PER_SIZE"), of_blocks)
    ):
        costs, ratio = fitted(*map(list, zip(*found, strict=True)))
        for n, c in zip(names, costs): print(n, f"{c:.2g}", end=" ")
        print(f"within a factor of {ratio:.2f}")
    for n in (100, 300, 1000):
        t = of_dense_step(n)
        print("dense", n, t, t / n**3)


if __name__ == "__main__":
    linear_algebra()
