"""A step of a Gaussian with a sparse precision: as an arrow matrix, and as it is, with what elimination fills in.

``python tests/benchmarks/fill.py [INSTEVAL]`` prints a table, with a row of lme4's InstEval where its ratings are given
as CSV. Processor seconds, the least of six steps.
"""

import sys
import time

import numpy as np
import pandas as pd

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import SparseFamily
from pymc_ngvi.families.dissection import find_blocks, structure_of
from pymc_ngvi.families.matrices.sparse.structure import SparseStructure

N_STEPS = 6
#: Entries of an arrow beyond which its step is not measured.
MOST_ENTRIES = 20_000_000


class Known:
    """Minus a precision as a mean Hessian."""

    def __init__(self, matrix):
        self.pattern = Pattern.of(matrix)
        self._values = -np.asarray(matrix[self.pattern.rows, self.pattern.cols]).ravel()

    def values(self):
        return self._values


def chain(n):
    return sparse.diags_array([-np.ones(n - 1), np.full(n, 2.1), -np.ones(n - 1)], offsets=[-1, 0, 1]).tocsr()


def grid(side):
    one, path = sparse.eye_array(side), chain(side)
    return (sparse.kron(path, one) + sparse.kron(one, path)).tocsr()


def crossed(first, second):
    n = len(first)
    levels = np.concatenate([first, first.max() + 1 + second])
    rows = sparse.csr_array((np.ones(2 * n), (np.tile(np.arange(n), 2), levels)))
    return (rows.T @ rows + 3.0 * sparse.eye_array(rows.shape[1])).tocsr()


def seconds(structure, hessian):
    """Return what the linear algebra of one step takes, covariances of the pattern included."""
    n, pattern, found = hessian.pattern.n_dim, hessian.pattern, []
    q = SparseFamily(structure).from_scale(np.zeros(n), np.ones(n))
    for _ in range(N_STEPS):
        start = time.process_time()
        curvature = q.curvature(hessian)
        q.flat(q.curvature_error(curvature))
        q, _ = q.precision_scaled_by(q.add_to_diagonal(0.5 * curvature, 0.5), np.ones(n))
        q.covariances(pattern.rows, pattern.cols)
        found.append(time.process_time() - start)
    return min(found)


def row(name, matrix):
    hessian = Known(matrix)
    start = time.process_time()
    filled = SparseStructure.of(hessian.pattern)
    filled.fronts.diagonal  # noqa: B018 (all that is found once)
    found = time.process_time() - start
    arrow = find_blocks(hessian.pattern)
    n_arrow = arrow.pattern.n_entries
    of_arrow = f"{seconds(structure_of(arrow), hessian):.3f}" if n_arrow < MOST_ENTRIES else "-"
    numbers = f"{arrow.n_border:,} | {n_arrow:,} | {filled.fronts.n_entries:,} | {found:.2f}"
    print(f"| {name} | {numbers} | {of_arrow} | {seconds(filled, hessian):.3f} |", flush=True)


def main():
    print("| pattern | border | entries: arrow | with fill-in | order | step: arrow | with fill-in |")
    print("|---|---|---|---|---|---|---|")
    for n in (1_000, 10_000, 100_000):
        row(f"chain of {n:,}", chain(n))
    for side in (30, 50, 100, 316):
        row(f"grid of {side} x {side}", grid(side))
    if len(sys.argv) > 1:
        ratings = pd.read_csv(sys.argv[1])
        codes = (ratings[name].astype("category").cat.codes.to_numpy().astype(int) for name in ("s", "d"))
        row("InstEval, 2,972 students, 1,128 lecturers", crossed(*codes))


if __name__ == "__main__":
    main()
