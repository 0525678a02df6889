"""Reports of a distribution that is no Gaussian and has no density: a weighted pool of draws."""

import warnings

from dataclasses import dataclass, replace

import matplotlib
import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal

import pymc_ngvi.core.stored

from pymc_ngvi import LogDensity, NGVIApproximation, load
from pymc_ngvi.core.psis import pareto_khat
from pymc_ngvi.families import DiagonalState, FullState, MixtureState, StudentTState
from pymc_ngvi.results.costs import direct_costs
from pymc_ngvi.results.distributions.variational import StateDistribution, distribution_of
from pymc_ngvi.results.posterior import MovePlan

matplotlib.use("agg")

MEAN, SD = np.array([1.0, -0.5]), np.array([0.5, 2.0])
WIDER = 1.3


@dataclass(frozen=True)
class PoolState:
    """Points with weights: draws are points, one uniform each."""

    points: np.ndarray
    log_weights: np.ndarray

    n_uniform = 1

    @property
    def n_dim(self):
        return self.points.shape[1]

    @property
    def weights(self):
        return np.exp(self.log_weights) / np.exp(self.log_weights).sum()

    def params(self):
        return {"points": self.points, "log_weights": self.log_weights}

    @classmethod
    def from_params(cls, params):
        return cls(**params)

    def draws(self, base):
        ends = np.cumsum(self.weights)
        return self.points[np.searchsorted(ends, base[:, -1] * ends[-1], side="right")]

    def mean(self):
        return self.weights @ self.points

    def cov(self):
        away = self.points - self.mean()
        return (away * self.weights[:, None]).T @ away

    def sd(self):
        return np.sqrt(np.diag(self.cov()))

    def content(self):
        return self.params()

    @classmethod
    def of_content(cls, content, density):
        assert density.n_dim == content["points"].shape[1]
        return cls(**content)


class OfPool(StateDistribution):
    """A pool as reports read it: the points are what importance weights are of."""

    family = "pool"

    def log_density(self, theta):
        return None

    def rough_log_density(self, theta):
        return None

    def stats(self, theta, rng, log_q):
        return {}

    def proposed(self, n, rng):
        return self.q.points[rng.integers(len(self.q.points), size=n)]

    def log_weights(self, theta, density):
        place = {point.tobytes(): w for point, w in zip(self.q.points, self.q.log_weights, strict=True)}
        return np.array([place[np.ascontiguousarray(point).tobytes()] for point in theta])

    def plan(self, density):
        return MovePlan(density, self.gaussian, self.q.draws)

    def costs(self, density, record):
        return direct_costs(density, record, self.n_dim, self.q.points.size)


@distribution_of.register
def _(q: PoolState):
    return OfPool(q)


def model():
    with pm.Model() as made:
        x = pm.Normal("x", MEAN, SD)
        pm.Deterministic("difference", x[1] - x[0])
    return made


def pool(density, seed=1, n=40_000):
    points = MEAN + WIDER * SD * np.random.default_rng(seed).standard_normal((n, 2))
    wide = DiagonalState(MEAN, WIDER * SD)
    return PoolState(points, density.logp(points) - wide.log_density(points))


@pytest.fixture(scope="module")
def approx():
    density = LogDensity(model())
    return NGVIApproximation(density, pool(density), random_seed=3)


def test_draws_have_the_moments_of_the_posterior(approx):
    theta = approx.draw_flat(8_000, 1)
    assert_allclose(theta.mean(axis=0), MEAN, atol=4.0 * SD.max() / np.sqrt(8_000))
    assert_allclose(theta.std(axis=0), SD, rtol=4.0 / np.sqrt(2 * 8_000))
    assert_array_equal(approx.draw_flat(8_000, 1), theta)


def test_moments(approx):
    error = 4.0 * WIDER / np.sqrt(40_000)
    assert_allclose((approx.mean_flat - MEAN) / SD, 0.0, atol=error)
    assert_allclose(approx.sd_flat, SD, rtol=error)
    assert_array_equal(approx.mean.eval(), approx.mean_flat)
    assert_array_equal(approx.std.eval(), approx.sd_flat)
    assert_array_equal(approx.cov.eval(), approx.cov_of("x").values)
    assert_allclose(approx.cov_of("difference").values.item(), np.sum(SD**2), rtol=8.0 / np.sqrt(10_000))
    assert_allclose(approx.state.std["x"].values, SD, rtol=5.0 / np.sqrt(4_000))


def test_samples_have_log_p_but_no_log_q(approx):
    tree = approx.sample(50, chains=2, random_seed=1, log_p=True)
    theta = approx.draw_flat(100, np.random.default_rng(1))
    assert_array_equal(tree.posterior["x"].values.reshape(-1, 2), theta)
    assert set(tree.sample_stats.data_vars) == {"log_p"}
    assert_array_equal(tree.sample_stats["log_p"].values.ravel(), approx.density.logp(theta))


def test_khat_is_that_of_its_own_weights(approx):
    """Weights of a wider proposal are bounded: their k-hat is below 0, and each value is one of the pool's."""
    assert approx.khat() < 0.0
    rng = np.random.default_rng(7)
    ratio = approx.q.log_weights[rng.integers(len(approx.q.points), size=500)]
    assert approx.khat(500, 7) == pareto_khat(ratio, np.zeros(500))
    approx.plot_khat()


def test_the_elbo_of_a_diagnosis_is_that_of_the_proposal(approx):
    """-KL(N(0, 1.3^2) || N(0, 1)) in two dimensions, since log p is normalised here."""
    diagnosis = approx.diagnose(draws=4_000, random_seed=2)
    expected = -2.0 * (0.5 * WIDER**2 - 0.5 - np.log(WIDER))
    assert abs(diagnosis.elbo.value - expected) < 5.0 * diagnosis.elbo.se
    assert diagnosis.reliable, diagnosis.reasons
    assert diagnosis.n_moved > 200
    assert "not made by a fit" in str(diagnosis)
    assert "symmetries of log p" in diagnosis.left_out  # which need log q


def test_a_pool_that_is_wrong_is_found_by_moved_draws(approx):
    shifted = PoolState(approx.q.points + np.array([0.5, 0.0]), approx.q.log_weights)
    diagnosis = NGVIApproximation(approx.density, shifted).diagnose(draws=500, random_seed=1)
    assert not diagnosis.reliable
    assert "`x[0]`" in diagnosis.reasons[0]


def test_a_thorough_diagnosis_looks_for_no_modes_where_the_density_is_not_known(approx):
    assert approx.diagnose(thorough=True, draws=500, random_seed=1).reliable


def test_summary_and_representation(approx):
    summary = approx.summary(500, random_seed=1)
    assert "Reliable" in str(summary)
    assert_allclose(summary.table["mean"].iloc[:2].astype(float), MEAN, atol=5.0 * SD.max() / np.sqrt(500))
    assert repr(approx) == "NGVIApproximation(PoolState, n_dim=2, not fitted)"
    assert "PoolState" in approx._repr_html_()
    assert approx.structure.n_dim == 2


def test_a_start_for_nuts(approx):
    init = approx.sampler_init(3, 5)
    assert_array_equal(init.covariance, approx.q.cov())
    assert {p.tobytes() for p in init.points} <= {p.tobytes() for p in approx.q.points}


def test_nodes_follow_the_pool(approx):
    with approx.model:
        node = approx.sample_node(approx.model["difference"], size=4_000)
    values = node.eval()
    assert_allclose(values.mean(), MEAN[1] - MEAN[0], atol=4.0 * np.sqrt(np.sum(SD**2) / 4_000))


NEEDS_A_DENSITY = {
    "log_q": lambda a: a.log_q(np.zeros((1, 2))),
    "corrected": lambda a: a.corrected(200, random_seed=1),
    "psis": lambda a: a.sample(200, importance="psis", random_seed=1),
    "psir": lambda a: a.sample(20, importance="psir", random_seed=1),
}


@pytest.mark.parametrize("name", NEEDS_A_DENSITY)
def test_what_needs_a_density_is_refused(approx, name):
    with pytest.raises(ValueError, match="The density of this approximation, a PoolState, is not known"):
        NEEDS_A_DENSITY[name](approx)


@pytest.mark.parametrize("name", ["worth", "responsibilities", "plot_components"])
def test_what_is_of_a_family_is_refused(approx, name):
    with pytest.raises(ValueError, match="q is a PoolState"):
        getattr(approx, name)()


def test_a_class_with_content_of_its_own_is_saved(approx, tmp_path, monkeypatch):
    monkeypatch.setattr(pymc_ngvi.core.stored, "_BY_TAG", dict(pymc_ngvi.core.stored._BY_TAG))
    monkeypatch.setattr(pymc_ngvi.core.stored, "_BY_CLASS", dict(pymc_ngvi.core.stored._BY_CLASS))
    pymc_ngvi.core.stored.stored("test.pool")(PoolState)
    approx.save(tmp_path / "pool.nc")
    again = load(tmp_path / "pool.nc", model())
    assert_array_equal(again.draw_flat(50, 1), approx.draw_flat(50, 1))
    assert again.khat(500, 7) == approx.khat(500, 7)


# --- distributions of fits --------------------------------------------------------------------------------------------


STATES = {
    "diagonal": DiagonalState(MEAN, SD),
    "full": FullState(MEAN, np.array([[1.0, 0.0], [0.5, 2.0]])),
    "mixture": MixtureState.of([DiagonalState(MEAN, SD), DiagonalState(-MEAN, SD)]),
    "student_t": StudentTState(DiagonalState(MEAN, SD), 5.0),
}


@pytest.mark.parametrize("family", STATES)
def test_a_distribution_says_of_itself_what_reports_ask(family):
    q = STATES[family]
    found, rng = distribution_of(q), np.random.default_rng(2)
    assert found.family == family
    assert found.name == type(q).__name__
    assert bool(found.detail) == (family == "mixture")
    theta = found.draw(400, np.random.default_rng(1))
    assert_array_equal(theta, q.draws(found.base(400, np.random.default_rng(1))))
    assert_array_equal(found.proposed(400, np.random.default_rng(1)), theta)
    density = LogDensity(model())
    assert_array_equal(found.log_weights(theta, density), density.logp(theta) - q.log_density(theta))
    assert set(found.stats(theta, rng, True)) == {"log_q"} | ({"component"} if family == "mixture" else set())
    assert set(found.groups(density.layout)) == ({"components"} if family == "mixture" else set())
    index = np.array([1])
    assert_allclose(found.cov_block(index), found.cov()[1:, 1:])
    plan = found.plan(density)
    assert plan.coupled == (family in ("diagonal", "full"))
    assert hasattr(plan.gaussian, "whiten")


@pytest.mark.parametrize("family", ["diagonal", "full"])
def test_matched_draws_have_exact_moments(family):
    found = distribution_of(STATES[family])
    theta = found.draw_matched(100, np.random.default_rng(1))
    assert_allclose(theta.mean(axis=0), found.mean(), atol=1e-12)
    assert_allclose(np.cov(theta.T, bias=True), found.cov(), atol=1e-12)


def test_a_distribution_is_chosen_anew_for_each_q_and_kept_for_one():
    approx = NGVIApproximation(LogDensity(model()), STATES["diagonal"], random_seed=1)
    first = approx._distribution
    assert approx._distribution is first
    khat = approx.khat()
    approx.set_state(replace(STATES["diagonal"], location=MEAN + 1.0))
    assert approx._distribution is not first
    assert_array_equal(approx.mean_flat, MEAN + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert approx.khat() != khat
