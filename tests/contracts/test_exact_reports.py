"""Everything that an approximation offers, of one whose posterior is exact."""

import functools

import arviz as az
import matplotlib
import numpy as np
import pytest

from exact import MODELS, QUIET, fit, one
from numpy.testing import assert_allclose, assert_array_equal

from pymc_ngvi import NGVI
from pymc_ngvi.results.summary import _error_sentence

matplotlib.use("agg")

pytestmark = pytest.mark.usefixtures("_compiled_once")

both = pytest.mark.parametrize("name", ["one", "two"])


@functools.cache
def model_of(name):
    return MODELS[name]()


@functools.cache
def fitted(name):
    """Return a fit that no test changes."""
    return fit(model_of(name))


# --- draws ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", [1, 2])
def test_draws_have_the_moments_of_the_state(name, seed):
    approx, n = fitted(name), 4_000
    theta = approx.draw_flat(n, random_seed=seed)
    error = approx.sd_flat / np.sqrt(approx._state.effective_size)
    assert_allclose(theta.mean(axis=0), approx.mean_flat, atol=4.5 * error.max())
    assert np.all(np.abs(theta.mean(axis=0) - approx.mean_flat) < 4.5 * error)
    assert_allclose(np.corrcoef(theta.T), _correlations(approx._distribution.cov()), atol=0.12)


def _correlations(cov):
    sd = np.sqrt(np.diag(cov))
    return cov / np.outer(sd, sd)


@both
def test_samples(name):
    approx = fitted(name)
    tree = approx.sample(300, chains=2, random_seed=3, log_p=True, include_transformed=True)
    assert dict(tree.posterior.sizes)["chain"] == 2
    assert {"mu", "scale", "b", "total", "scale_log__"} == set(tree.posterior.data_vars)
    assert_allclose(tree.posterior["scale_log__"], np.log(tree.posterior["scale"]), rtol=1e-12)
    theta = approx.draw_flat(300, random_seed=3)
    assert_array_equal(tree.sample_stats["log_p"].values.ravel(), approx.log_p(theta))
    assert "log_q" not in tree.sample_stats
    some = approx.sample(20, var_names=["total"], random_seed=3)
    assert set(some.posterior.data_vars) == {"total"}
    trace = approx.sample(20, return_inferencedata=False, random_seed=3)
    assert_array_equal(trace["total"], some.posterior["total"].values.ravel())
    assert {"mu", "scale", "b"} == set(approx.sample(5, log_p=False).posterior.data_vars) - {"total"}
    of_scale = approx.sample(20, var_names=["scale"], random_seed=3).posterior["scale"]
    assert_array_equal(np.sort(of_scale, axis=None), np.sort(trace["scale"], axis=None))
    state = approx._state
    theta = state.draw(20, np.random.default_rng(3), read=state.globals_)
    assert not np.ptp(theta[:, state.locals_], axis=0).any()  # none is drawn


@both
def test_attributes_say_how_many_draws_differ(name):
    approx, n = fitted(name), 2_500
    tree = approx.sample(n, random_seed=1)
    for group in (tree.posterior, tree.sample_stats):
        assert group.attrs["effective_sample_size"] == approx._state.effective_size_for(n) > n - 100
    mu, b = tree.posterior["mu"].values.reshape(n, -1)[:, 0], tree.posterior["b"].values.reshape(n, -1)
    assert tree.posterior.attrs["distinct_global_draws"] == len(np.unique(mu)) < n
    number = tree.sample_stats["global_draw"].values.ravel()
    assert len(np.unique(number)) == len(np.unique(mu))
    first = np.unique(number, return_index=True)[1]
    assert_array_equal(mu, mu[first][number])
    assert len(np.unique(b, axis=0)) > 0.99 * n  # effects differ where global parameters repeat


@pytest.mark.parametrize("n", [2_000, 20_000])
def test_arviz_finds_the_effective_size_of_draws_that_repeat(n):
    tree = fitted("plain").sample(n, random_seed=1)
    size = min(tree.posterior.attrs["effective_sample_size"], n)
    for ess in az.ess(tree).data_vars.values():
        assert_allclose(ess, size, rtol=0.3)
    assert all(rhat < 1.01 for rhat in az.rhat(tree).data_vars.values())
    repeated = [set(np.unique(chain)) for chain in tree.posterior["rate"].values]
    assert len(set.union(*repeated)) > sum(map(len, repeated)) - 4  # a draw is in one chain, or at the end of it
    az.plot_rank(tree)


def test_the_same_seed_gives_the_same_bits():
    approx, again, other = fitted("one"), fit(one()), fit(model_of("one"), seed=2)
    assert_array_equal(approx.draw_flat(100, random_seed=1), again.draw_flat(100, random_seed=1))
    assert_array_equal(approx.mean_flat, again.mean_flat)
    assert_array_equal(again.draw_flat(5), fit(model_of("one")).draw_flat(5))  # of their own generators
    error = approx.sd_flat / np.sqrt(approx._state.effective_size)
    change = np.abs(other.mean_flat - approx.mean_flat)
    assert np.all(change > 0.0)
    assert np.all(change < 5.0 * np.sqrt(2.0) * error)


# --- what there is nothing for ----------------------------------------------------------------------------------------

REFUSED = {
    "corrected": (lambda a: a.corrected(), "There is nothing for corrected.. to correct.*approx.gaussian"),
    "log_q": (lambda a: a.log_q(a.draw_flat(2)), "an exact posterior, is not known.*approx.gaussian.* has log_q"),
    "worth": (lambda a: a.worth(), "is there for mixtures, and q is an exact posterior"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_there_is_nothing_for(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call(fitted("one"))


def test_what_the_gaussian_has():
    approx = fitted("one")
    for name in ("q", "params"):
        with pytest.raises(AttributeError, match=r"has no q: approx\.gaussian has that of the Gaussian fit"):
            getattr(approx, name)
    assert approx.gaussian.params
    assert np.isfinite(approx.gaussian.log_q(approx.draw_flat(3))).all()
    assert approx.gaussian.gaussian is approx.gaussian
    with pytest.raises(AttributeError, match="q is an exact posterior"):
        _ = approx.weights


# --- moments ----------------------------------------------------------------------------------------------------------


@both
def test_moments_by_variable(name):
    approx = fitted(name)
    cov = approx._distribution.cov()
    assert_array_equal(approx.mean_data["mu"].values.ravel(), approx.mean_flat[: approx.mean_data["mu"].size])
    assert_allclose(np.sqrt(np.diag(cov)), approx.sd_flat, rtol=1e-8)
    assert_allclose(approx.cov_of(["mu", "scale"]), cov[: (n := approx.cov_of(["mu", "scale"]).shape[0]), :n])
    state = approx.state
    sample = approx.sample(4_000, random_seed=5).posterior
    assert_allclose(state.std["scale"], sample["scale"].std(("chain", "draw")), rtol=0.15)
    assert_allclose(state.mean["scale"], np.exp(approx.mean_data["scale_log__"]), rtol=1e-12)


@both
def test_nodes(name):
    approx = fitted(name)
    assert_array_equal(approx.mean.eval(), approx.mean_flat)
    assert_array_equal(approx.std.eval(), approx.sd_flat)
    assert_array_equal(approx.cov.eval(), approx._distribution.cov())


def test_sample_node():
    approx = fitted("one")
    with approx.model:
        values = approx.sample_node(approx.model["total"], size=2_000).eval()
    weights = np.isin(np.arange(approx.layout.n_dim), [0, 2]) - 1.0 * (np.arange(approx.layout.n_dim) == 3)
    spread = float(np.sqrt(weights @ approx._distribution.cov() @ weights))
    expected = approx.mean_flat[[0, 2, 3]] @ [1.0, 1.0, -1.0]
    assert_allclose(values.mean(), expected, atol=5.0 * spread / np.sqrt(1_000))
    assert_allclose(values.std(), spread, rtol=0.12)


# --- reports ----------------------------------------------------------------------------------------------------------


@both
def test_summaries_state_the_effective_size(name):
    approx = fitted(name)
    text = " ".join(str(approx.summary(draws=1_000)).split())
    size = f"{approx._state.effective_size:,.0f}"
    assert f"Exact up to Monte Carlo error (effective sample size {size})" in text
    assert "Monte Carlo error of a mean: 0.032 of its sd (1,000 draws)." in text
    assert "mu" in text
    most = approx._distribution.effective(40_000)
    assert most < 16_000
    assert _error_sentence(approx._posterior, 40_000) == (
        f"Monte Carlo error of a mean: {1 / np.sqrt(most):.2g} of its sd (40,000 draws, worth {most:,.0f})."
    )


def test_words():
    approx = fitted("one")
    size = f"{approx._state.effective_size:,.0f}"
    assert repr(approx).startswith(
        f"NGVIApproximation(exact posterior with an effective sample size of {size}, n_dim=10"
    )
    card = approx._repr_html_()
    assert "exact posterior, 10 free parameters" in card
    assert f"Exact up to Monte Carlo error (effective sample size {size})" in card
    assert "full family" in approx.gaussian._repr_html_()
    assert str(approx.structure) == str(approx.gaussian.structure)
    assert "8 independent blocks" in str(approx.structure)


def test_pictures():
    approx = fitted("one")
    axes = approx.plot_fit()
    assert axes[0].get_title(loc="left").startswith("Converged after")
    title = " ".join(approx.plot_khat().get_title(loc="left").split())
    assert title.startswith("Weights of the pool of global parameters")
    assert f"Pareto k-hat {approx.khat():.2f}" in title
    assert approx.khat(500, 3) == approx.khat()  # of the pool, whatever is asked for
    reference = approx.gaussian.sample(200, random_seed=1)
    assert approx.plot_comparison(reference, ["mu", "scale"], draws=200, random_seed=2) is not None
    matplotlib.pyplot.close("all")


# --- what others do with it -------------------------------------------------------------------------------------------


@both
def test_a_start_for_nuts(name):
    approx = fitted(name)
    init = approx.sampler_init(3, random_seed=1)
    assert_array_equal(init.covariance, approx._distribution.cov())
    assert_array_equal(init.mean, approx.mean_flat)
    assert_array_equal(init.points, approx.draw_flat(3, random_seed=1))
    assert init.initvals[0]["b"].shape == model_of(name)["b"].eval().shape


def test_the_object_of_inference():
    inference = NGVI(model_of("one"), random_seed=1, tol=2.0)
    before = inference.approx
    approx = inference.fit(**QUIET)
    assert inference.approx is approx
    assert approx.gaussian is before
    assert inference.hist is approx.hist
    n, mean = approx.n_iterations, approx.mean_flat
    node = approx.mean
    assert inference.refine(50, progressbar=False, tol=0.05) is approx
    assert approx.n_iterations > n
    assert approx.record.is_exact
    assert_array_equal(approx._state.gaussian.mean(), approx.gaussian.mean_flat)
    assert not np.array_equal(approx.mean_flat, mean)
    assert_array_equal(node.eval(), approx.mean_flat)
