"""Fits with stochastic step rules: how they end, whether what they say of themselves is true, and going on."""

import numpy as np
import pymc as pm
import pytest

from matrix import each_stochastic_pair, first_state, fit, ignore, make_rule, state_of, two_seeds
from scipy.special import expit
from targets import NumpyTarget, Quadratic, Walled, kinked, logistic, poisson

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning, Status
from pymc_ngvi.core.types import Evaluation
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.options import choose
from pymc_ngvi.fitting.record import elbo_of as _elbo
from pymc_ngvi.methods.schedule import has_diverged

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

QUIET = {"progressbar": False, "backend": "quick"}


def exact_gap(target, family, q):
    return target.elbo(*target.optimum(family)) - target.elbo(q.mean(), q.cov())


def logistic_model(n=60, n_dim=3):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, n_dim))
    y = (rng.random(n) < expit(x @ np.array([1.0, -0.5, 0.3]))).astype(int)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 3, shape=n_dim)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y)
    return model


# --- how a fit ends ---------------------------------------------------------------------------------------------------

#: Steps and draws that level off within the tolerance, and ones whose noise keeps the fit far above it.
ENDS = [
    pytest.param({"update": "natural", "estimator": "price", "step": "constant"}, Status.CONVERGED, id="price"),
    pytest.param({"update": "natural", "estimator": "price", "step": "decay"}, Status.CONVERGED, id="decay"),
    pytest.param(
        {"update": "cholesky", "estimator": "stein", "step": "constant", "n_draws": 64},
        Status.CONVERGED,
        id="stein",
    ),
    # Without sticking the landing there is noise at the optimum as well.
    pytest.param(
        {"update": "cholesky", "estimator": "pathwise", "step": "constant", "n_draws": 1, "stl": False, "window": 60},
        Status.LEVELLED,
        id="one draw",
    ),
]


@pytest.mark.parametrize(("options", "status"), ENDS)
@two_seeds
def test_levelled_off_within_the_tolerance_is_converged_and_above_it_a_warning(options, status, seed):
    def fitted():
        return pymc_ngvi.fit_ngvi(20_000, model=logistic_model(), random_seed=seed, **QUIET, **options)

    if status is Status.CONVERGED:
        approx = fitted()  # warnings are errors
        assert approx.converged
        assert approx.gap <= 0.05
    else:
        with pytest.warns(ConvergenceWarning, match=r"levelled off.*approx\.gap is what is left"):
            approx = fitted()
        assert not approx.converged
        assert approx.gap > 0.05
    assert approx.status is status


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (logistic, "full"),
        (logistic, "diagonal"),
        (logistic, "block"),
        (poisson, "full"),
        pytest.param(poisson, "diagonal", marks=pytest.mark.slow),
        pytest.param(poisson, "block", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        # Early, and at the end: steps whose noise leaves a gap, and those that leave next to none.
        {"update": "natural", "estimator": "price", "step": "constant", "n": 8},
        {"update": "natural", "estimator": "price", "step": "decay", "n": 2_000},
        {"update": "natural", "estimator": "stein", "step": "proximal", "n": 150},
        {"update": "cholesky", "estimator": "pathwise", "step": "constant", "n": 150, "n_draws": 2, "step_size": 0.03},
        {"update": "cholesky", "estimator": "pathwise", "step": "snngm", "n": 1_500},
        {"update": "euclidean", "estimator": "pathwise", "step": "adam", "n": 600, "step_size": 0.02},
    ],
    ids=lambda options: options["step"] + "-" + options["estimator"],
)
def test_what_a_fit_says_of_itself_is_true(make, family, options):
    """The gap within a factor of 3, or both small; the ELBO within 5 standard errors."""
    options = dict(options)
    n = options.pop("n")
    axes = {axis: options.pop(axis) for axis in ("update", "estimator", "step")}
    target = make().fresh()
    rule, state = fit(target, choose(family=family, **axes), n=n, seed=1, **options)
    q = state.rule.q
    assessment = rule.assess(state.rule)
    gap = exact_gap(target, family, q)
    # Of independent blocks, errors along directions in which coordinates go together weigh more than they count.
    assert max(assessment.gap, gap) < 0.02 or gap / 3 < assessment.gap < 3 * gap
    elbo = _elbo(q, assessment)
    assert 0.0 < elbo.se < 0.3
    assert abs(elbo.value - target.elbo(q.mean(), q.cov())) < 5 * elbo.se


@two_seeds
def test_gaps_that_are_measured_on_the_way_are_true(seed):
    """With Hessians, each iteration measures the gap of its state, less the noise floor: unbiased."""
    target = logistic(n_dim=3).fresh()
    choice = choose(update="natural", estimator="price", step="constant")
    rule = make_rule(target, choice, seed=seed, step_size=1e-9, window=1000)  # stays where it is
    mean, cov = target.optimum("full")
    # A third of a nat off in the mean, where the estimate is right to second order.
    q = state_of("full", mean + 0.5 * np.linalg.cholesky(cov)[:, 0], cov)
    grad, curvature = target.moments(q.mean(), q.cov())
    c = np.linalg.cholesky(cov)
    expected = 0.5 * np.sum((c.T @ grad) ** 2) + 0.25 * np.sum((c.T @ curvature @ c - np.eye(3)) ** 2)
    state, gaps = rule.init(q), []
    for _ in range(300):
        state = rule.step(state)
        gaps.append(state.gap)
    assert abs(np.mean(gaps) - expected) < 4 * np.std(gaps) / np.sqrt(300)


@each_stochastic_pair
def test_stalled_where_no_draw_is_finite(choice):
    target = Walled(Quadratic(np.zeros(3), np.eye(3)), -1e6)
    rule = make_rule(target, choice, seed=1)
    q = first_state(make_rule(target.inside, choice, seed=1), target.inside, choice).rule.q
    state = loop.run(rule, loop.start(rule, q), 500, ignore)
    assert state.status is Status.STALLED
    assert state.n_iterations == 50
    assert state.rule.q is q
    assert state.rule.n_dropped == 50 * state.rule.n_draws
    assert target.n_hessians == 0
    assert not np.isfinite(rule.assess(state.rule).gap)


# --- what it costs ----------------------------------------------------------------------------------------------------


class WithoutHessian(NumpyTarget):
    """Another target that has no second derivatives."""

    has_hessian = False

    def __init__(self, inside):
        super().__init__(inside.n_dim)
        self._inside = inside

    def _logp(self, theta):
        return self._inside._logp(theta)

    def _grad(self, theta):
        return self._inside._grad(theta)

    def mean_hessian(self, theta):
        raise AssertionError("there are no second derivatives")


@pytest.mark.parametrize("estimator", ["stein", "pathwise"])
@two_seeds
def test_a_fit_without_second_derivatives_measures_its_gap_from_gradients(estimator, seed):
    """Long enough for Hessians to be cheap, were there any; and stopped where a gap is left."""
    inside = logistic(n_dim=3)
    target = WithoutHessian(inside)
    choice = choose(update="cholesky", estimator=estimator, step="constant")
    rule, state = fit(target, choice, n=40, seed=seed, n_draws=32, step_size=0.05)
    assert target.n_gradients > 2 * 64 * 3
    assessment = rule.assess(state.rule)
    gap = exact_gap(inside, "full", state.rule.q)
    assert gap > 0.1
    assert gap / 3 < assessment.gap < 3 * gap
    assert assessment.gap_sd < gap


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["decay", "constant"])
def test_a_certified_fit_goes_on_for_a_smaller_tolerance_only(step):
    target = logistic(n_dim=4)
    choice = choose(estimator="price", step=step)
    rule = make_rule(target, choice, seed=1, tol=0.5)
    ended = loop.run(rule, first_state(rule, target, choice), 2_000, ignore)
    assert ended.status is Status.CONVERGED
    assert exact_gap(target, "full", ended.rule.q) < 0.05
    assert loop.reopen(rule, ended) is ended
    finer = make_rule(target, choice, seed=1, tol=1e-6)
    reopened = loop.reopen(finer, ended)
    assert reopened.status is Status.RUNNING
    on = loop.run(finer, reopened, 200, ignore)
    assert on.n_iterations > ended.n_iterations
    assert exact_gap(target, "full", on.rule.q) < exact_gap(target, "full", ended.rule.q)
    np.testing.assert_array_equal(on.history.losses[: ended.n_iterations], ended.history.losses)


def test_refining_a_fit_that_has_levelled_off_goes_on():
    options = {"update": "cholesky", "estimator": "pathwise", "step": "constant", "stl": False, "n_draws": 1}
    with pytest.warns(ConvergenceWarning, match="levelled off"):
        approx = pymc_ngvi.fit_ngvi(5_000, model=logistic_model(), random_seed=1, window=20, **QUIET, **options)
    n = approx.record.n_iterations
    assert n % 20 == 0
    with pytest.warns(ConvergenceWarning, match=r"levelled off|iteration limit"):
        approx.refine(300, progressbar=False)
    assert n + 60 <= approx.record.n_iterations <= n + 300
    assert len(approx.hist) == approx.record.n_iterations


# --- far below the start ----------------------------------------------------------------------------------------------


def evaluated(h, q):
    theta = q.draws(np.random.default_rng(1).standard_normal((len(h), q.n_dim)))
    return Evaluation(theta, h + q.log_density(theta), theta, np.ones(len(h), dtype=bool), float(h.mean()))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("power", "on_batches"), [(3.0, False), (3.0, True), (30.0, False), (150.0, False)])
def test_a_fit_is_below_its_start_also_where_log_p_falls_exponentially(seed, power, on_batches):
    """Draws range over many orders of magnitude, and even the best of them are far below the start."""
    q, units = DiagonalState(np.zeros(2), np.ones(2)), np.arange(1_024).reshape(8, -1)
    h = -1e4 * np.exp(power * np.abs(np.random.default_rng(seed).standard_normal(1_024)))
    assert has_diverged(q, evaluated(h, q), units, -100.0, on_batches=on_batches)
    h[::3] = -100.0  # as good as the start: nothing is told by the others
    assert not has_diverged(q, evaluated(h, q), units, -100.0, on_batches=on_batches)


# --- what speaks against a certificate --------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("step", ["constant", "decay", "proximal"])
def test_kinks_that_hessians_miss_are_seen(step, seed):
    """Laplace variables: by Hessians the standard deviations run away; by gradients they come out right."""
    target = WithPrior(kinked())
    rule, state = fit(target, choose(update="natural", estimator="price", step=step), n=100, seed=seed)
    assert rule.conclude(Status.LEVELLED, rule.assess(state.rule)) is Status.NOT_SMOOTH
    rule, state = fit(target, choose(update="natural", estimator="stein", step=step), n=400, seed=seed)
    assert rule.conclude(Status.LEVELLED, rule.assess(state.rule)) is Status.CONVERGED
    # With E|x| = sqrt(2/pi) s, the ELBO -sqrt(2/pi) s - s^2/2 + log s of each coordinate is largest at
    best = 0.5 * (np.sqrt(2 / np.pi + 4) - np.sqrt(2 / np.pi))
    np.testing.assert_allclose(state.rule.q.sd(), best, rtol=0.05)


class WithPrior(NumpyTarget):
    """Another target with independent standard normal priors."""

    def __init__(self, inside):
        super().__init__(inside.n_dim)
        self.inside = inside

    def _logp(self, theta):
        return self.inside._logp(theta) - 0.5 * np.sum(theta**2, axis=-1)

    def _grad(self, theta):
        return self.inside._grad(theta) - theta

    def _hessians(self, theta):
        return self.inside._hessians(theta) - np.eye(self.n_dim)


@two_seeds
@pytest.mark.parametrize("options", [{"step": "constant"}, {"step": "constant", "estimator": "stein"}])
def test_a_fit_that_loses_its_draws_has_not_converged(options, seed):
    target = Walled(Quadratic(np.zeros(3), np.eye(3)), 1.0)
    rule, state = fit(target, choose(update="natural", **options), n=50, seed=seed)
    assert rule.conclude(Status.LEVELLED, rule.assess(state.rule)) is Status.OUTSIDE_SUPPORT
