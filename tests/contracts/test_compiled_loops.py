"""Loops that Numba compiles: without a cache, with an empty one that two processes fill, in threads, and forked."""

import os
import subprocess
import sys

import numpy as np
import pytest

from scipy import sparse
from threadpoolctl import threadpool_info, threadpool_limits

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.sparse import kernels
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure

#: Factors a chain, in a process of its own.
SCRIPT = """
import multiprocessing
import sys
import warnings

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import pymc_ngvi

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import fronts_of

assert "numba" not in sys.modules
if "no cache" in sys.argv:
    import numba

    compiled = numba.njit

    def refuse(*args, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(*args, **options)

    numba.njit = refuse

matrix = 3.0 * np.eye(40) + np.eye(40, k=1) + np.eye(40, k=-1)
fronts = fronts_of(Pattern.of(matrix))
panels = np.zeros(fronts.n_panels)
panels[fronts.places(fronts.pattern.rows, fronts.pattern.cols)] = matrix[fronts.pattern.rows, fronts.pattern.cols]


def found(_):
    return SparseCholesky.of(fronts, panels).log_det()


expected = 0.5 * np.linalg.slogdet(matrix)[1]
for each in map(found, range(2)):
    np.testing.assert_allclose(each, expected, rtol=1e-12)
if "others" in sys.argv:
    warnings.simplefilter("ignore")
    with ThreadPoolExecutor(4) as pool, multiprocessing.get_context("fork").Pool(2) as processes:
        for each in (*pool.map(found, range(40)), *processes.map(found, range(4))):
            np.testing.assert_allclose(each, expected, rtol=1e-12)
"""


@pytest.mark.parametrize("how", ["no cache", "others"])
def test_loops_are_compiled_wherever_they_run(how, tmp_path):
    """With an empty cache by two processes at once."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", SCRIPT, how], env=env) for _ in range(1 + (how == "others"))]
    assert [process.wait(timeout=300) for process in started] == [0] * len(started)
    assert any(tmp_path.iterdir()) == (how == "others")


def test_large_fronts_keep_linear_algebra_to_one_thread(monkeypatch):
    """Where it wakes others, a factor of 2,100 coordinates took a hundred times as long beside another job."""
    matrix = np.eye(60) + 0.01
    pattern = Pattern.of(sparse.csr_array(matrix))
    structure = FilledStructure.of(pattern)
    panels = structure.panels_of(pattern, matrix[pattern.rows, pattern.cols])
    threads, factor = [], kernels.factor

    def watched(*args):
        threads.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
        return factor(*args)

    monkeypatch.setattr(kernels, "factor", watched)
    with threadpool_limits(2, user_api="blas"):
        assert SparseCholesky.of(structure.fronts, panels) is not None
    assert set(threads) == {1}
