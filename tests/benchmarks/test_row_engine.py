"""Rows of the models of the users' battery: engines agree on values and expectations."""

import numpy as np
import pytest

from users_models import MODELS

from pymc_ngvi.density import LogDensity
from pymc_ngvi.graphs.backends import quickly
from pymc_ngvi.rows.engines import ENGINES
from pymc_ngvi.rows.expectation import SummedRowFunction
from pymc_ngvi.rows.programs.operations import OnNumPy

#: Models whose log p is no sum over rows alone.
NO_ROWS = (
    "regression: horseshoe", "series and fields: holt", "series and fields: latent process",
    "series and fields: basis process", "structured: normal mixture", "structured: hidden markov",
    "structured: several outcomes", "structured: flat alone",
)  # fmt: skip


def whitened(function, rng):
    """Expectations of rows, whose covariances are those of one Gaussian."""
    n, k = function.index.shape
    _, at = np.unique(function.index, return_inverse=True)
    mean = 0.3 * rng.standard_normal(at.max() + 1)[at.reshape(n, k)]
    root = np.zeros((n, k, k))
    root[:, np.arange(k), np.arange(k)] = 0.2 + 0.1 * (at.reshape(n, k) % 3)
    codes = np.ones(n, dtype=np.int16)
    with np.errstate(all="ignore"):
        return function.whitened(mean, root, codes, np.arange(n))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_ROWS])
def test_rows_of_the_battery(name):
    made = MODELS[name][1]()
    density = LogDensity(made[0] if isinstance(made, tuple) else made)
    rows = density.by_rows.reading
    assert rows is not None
    assert not rows.terms.rest
    engines = [ENGINES[engine](quickly) for engine in ("quick", "c")]
    for kind in rows.terms.rows:
        found, expected = (engine.row_function(kind) for engine in engines)
        assert isinstance(found.function, OnNumPy) or kind.is_whole
        assert isinstance(found, SummedRowFunction) == (kind.sum_ is not None)
        one, other = (whitened(function, np.random.default_rng(3)) for function in (found, expected))
        there = np.isfinite(other)
        np.testing.assert_array_equal(np.isfinite(one), there)
        size = 1.0 + np.abs(other[there]).max(initial=0.0)
        np.testing.assert_allclose(one[there], other[there], rtol=1e-13, atol=1e-13 * size)
