"""The default fit on hierarchical models: what it finds of their structure, and that it loses nothing by it.

A precision that lacks the entries that the Hessian lacks contains the best Gaussian: sparse and dense have one optimum.
"""

import functools

import hierarchical
import numpy as np
import pymc as pm
import pytest

import pymc_ngvi  # noqa: F401

from pymc_ngvi import LogDensity
from pymc_ngvi.fitting.options import choose_family
from pymc_ngvi.results.structure import ModelStructure

#: What the structure says of each model; None: not compared, as it depends on how the border is cut.
WORDS = {
    "logistic_centred": "3 global parameters (`intercept`, `slope`, `scale_log__`); "
    "60 independent blocks of size 1 from `effect`.",
    "poisson_noncentred": "3 global parameters (`intercept`, `slope`, `scale_log__`); "
    "60 independent blocks of size 1 from `z`.",
    "correlated_noncentred": "6 global parameters (`beta` 2, `chol_cholesky-cov-packed__` 3, `noise_log__`); "
    "60 independent blocks of size 2 from `z`.",
    "funnel": "1 global parameter (`v`); 40 independent blocks of size 1 from `x`.",
    "joint": "5 global parameters (`intercept` 2, `scale_log__`, `loading`, `noise_log__`); "
    "60 independent blocks of size 1 from `effect`.",
    "gaussian_process": "Dense: the Hessian of log p couples all 81 coordinates.",
    "zero_sum": "Dense: the Hessian of log p couples all 61 coordinates.",
    "icar": "Dense: the Hessian of log p couples all 66 coordinates.",
    "nested": "4 global parameters (`mean`, `sd_log__` 3); 12 independent blocks of size 6 from `d`, `s`.",
    "potential": "2 global parameters (`mean`, `log_scale`); 60 independent blocks of size 1 from `effect`.",
    "with_coords": "4 global parameters (`beta` 2, `mean`, `scale_log__`); "
    "50 independent blocks of size 1 from `effect`.",
    "one_each": "3 global parameters (`intercept`, `slope`, `scale_log__`); "
    "150 independent blocks of size 1 from `effect`.",
}

#: Models whose posterior determines all scales: two fits end at the same Gaussian.
QUICK_FITS = [
    "logistic_centred",
    "gaussian_noncentred",
    "unequal",
    "joint",
    "nested",
    "potential",
    "one_each",
]
SLOW_FITS = [
    "poisson_centred",
    "logistic_noncentred",
    "negative_binomial_centred",
    "correlated_centred",
    "correlated_noncentred",
    "car",
    "rasch",
    "crossed_small",
    "hurdle",
    "student_effects",
]


def slow(names):
    """Return the names as parameters of tests that are marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def model_of(name):
    """Return a model, which no test changes: another fit of it builds nothing anew."""
    return hierarchical.MODELS[name]()


def fitted(name, **options):
    """Fit with the default options but for those given; every warning is an error."""
    with model_of(name):
        return pm.fit(method="ngvi", progressbar=False, random_seed=1, posterior="gaussian", **options)


def nats_apart(a, b):
    """Return the difference of two ELBOs, and what it may be: the gap of the lower one and three standard errors.

    A gap is estimated from the curvature that the last steps met: about as many nats, not more than twice as many.
    """
    low, high = sorted([a.record, b.record], key=lambda record: record.elbo.value)
    se = np.hypot(low.elbo.se, high.elbo.se)
    return high.elbo.value - low.elbo.value, 2.0 * low.gap + 3.0 * se


@pytest.mark.parametrize("name", WORDS)
def test_structure_in_words(name):
    density = LogDensity(model_of(name))
    assert str(ModelStructure(density.layout, density.pattern)) == WORDS[name]


@pytest.mark.parametrize("name", ["gaussian_process", "zero_sum", "icar"])
def test_dense_models_get_a_dense_covariance(name):
    assert choose_family(LogDensity(model_of(name))) == ("full", "the Hessian is dense")


@pytest.mark.parametrize("name", [*QUICK_FITS, *slow(SLOW_FITS)])
def test_sparse_and_dense_fits_agree(name):
    sparse, dense = fitted(name), fitted(name, family="full")
    assert sparse.record.family == "sparse"
    assert sparse.converged
    assert dense.converged
    difference, allowed = nats_apart(sparse, dense)
    assert difference < allowed
    sd = dense.sd_flat
    # Single coordinates may differ along flat directions, such as that of a scale; all together may not.
    assert np.sqrt(np.mean(((sparse.mean_flat - dense.mean_flat) / sd) ** 2)) < 0.15
    np.testing.assert_allclose(sparse.sd_flat, dense.sd_flat, rtol=0.15)


def test_a_crossed_design_has_one_factor_in_the_border():
    density = LogDensity(hierarchical.rasch(60, 12))
    frame = ModelStructure(density.layout, density.pattern).to_frame().set_index("name")
    assert frame.role["item"] == "global"
    assert frame.role["person"] == "local"
    assert frame.block_sizes["person"] == "1"


def test_levels_without_observations_keep_their_prior():
    approx = fitted("empty_groups")
    effect = approx.mean_flat[3:]
    scale = np.exp(approx.mean_flat[2])
    assert np.abs(effect[::3] / scale).max() < 0.1
    np.testing.assert_allclose(approx.sd_flat[3:][::3] / scale, 1.0, atol=0.15)
    assert np.abs(effect).max() > scale
