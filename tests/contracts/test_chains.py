"""Chains that begin at a fit: they find the posterior, and are never said to have arrived where they have not."""

import numpy as np
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from pymc_ngvi.core.sizes import ENOUGH
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.moves.chains import ChainCoordinates, phase_points_at, trajectory
from pymc_ngvi.moves.posterior import (
    MOST_RHAT,
    N_STARTS,
    Chains,
    MovedChecks,
    effective_sizes,
    mixing_of,
    most_trend,
    moved_until_arrived,
    nested_rhat,
    peak_size,
    starts_of,
    worth_of,
)

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N_CHAINS = 128

#: Standard errors that none of some hundred estimates exceeds.
MOST_ERRORS = 4.5


class Target:
    """A log density with its gradient; gradients are counted."""

    def __init__(self, function):
        self.function, self.n_gradients = function, 0

    def logp_grad(self, x):
        self.n_gradients += len(x)
        return self.function(x)


def gaussian(precision, mean=0.0):
    def function(x):
        pulled = (x - mean) @ precision
        return -0.5 * np.sum((x - mean) * pulled, axis=1), -pulled

    return function


def funnel(x):
    """Neal's funnel: v has the standard deviation 3, and the others that of exp(v / 2)."""
    v, y = x[:, 0], x[:, 1:]
    squares, k = np.sum(y**2, axis=1) * np.exp(-v), y.shape[1]
    grad = np.column_stack([-v / 9.0 + 0.5 * squares - 0.5 * k, -y * np.exp(-v)[:, None]])
    return -(v**2) / 18.0 - 0.5 * squares - 0.5 * k * v, grad


def banana(x):
    a, b = x[:, 0], x[:, 1] - 0.5 * (x[:, 0] ** 2 - 1.0)
    return -0.5 * a**2 - 0.5 * b**2 / 0.3, np.column_stack([-a + b / 0.3 * a, -b / 0.3])


def correlated(d, seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((d, d)) / np.sqrt(d)
    cov = a @ a.T + 0.05 * np.eye(d)
    return cov, np.linalg.qr(rng.standard_normal((d, d)))[0]


def moved(function, *fits, seed=1, most=2_000_000, n_chains=N_CHAINS, **options):
    return moved_until_arrived(
        Target(function), fits, n_chains, np.random.default_rng(seed), may_go_on=lambda n: n <= most, **options
    )


def standard(d, sd=1.0):
    return DiagonalState.from_scale(np.zeros(d), np.full(d, sd))


def test_trajectories_leave_a_posterior_as_it_is(rng):
    """Steps of a size that is often refused: without acceptance, variances would grow."""
    target, metric = Target(gaussian(np.eye(3))), ChainCoordinates.of(standard(3))
    points = phase_points_at(target, metric, rng.standard_normal((20_000, 3)))
    for _ in range(4):
        points, probability, _ = trajectory(target, metric, points, rng.standard_normal((20_000, 3)), 3, 1.4, rng)
    assert 0.3 < probability.mean() < 0.95
    assert_allclose(points.x.var(axis=0), 1.0, atol=MOST_ERRORS * np.sqrt(2.0 / 20_000))
    assert_allclose(points.x.mean(axis=0), 0.0, atol=MOST_ERRORS / np.sqrt(20_000))


def test_what_is_not_finite_is_refused(rng):
    def half(x):
        with np.errstate(invalid="ignore"):
            return np.where(x[:, 0] > 0.0, -x[:, 0], np.nan), np.where(x > 0.0, -1.0, np.inf)

    ended = moved(half, DiagonalState.from_scale(np.ones(1), np.ones(1)))
    x = ended.draws.x.ravel()
    assert ended.checks.is_exact
    assert (x > 0.0).all()
    # An exponential: the error of its mean is 1 over the root of the effective size.
    assert x.mean() == pytest.approx(1.0, abs=MOST_ERRORS / np.sqrt(ended.checks.bulk))


def test_starts_are_where_log_p_is_finite():
    def narrow(x):
        inside = np.abs(x).max(axis=1) < 0.3
        return np.where(inside, 0.0, -np.inf), np.zeros_like(x)

    starts = starts_of(Target(narrow), [standard(2)], N_STARTS, np.random.default_rng(1))
    assert (np.abs(starts) < 0.3).all()
    nowhere = Target(lambda x: (np.full(len(x), np.nan), np.zeros_like(x)))
    assert starts_of(nowhere, [standard(2)], N_STARTS, np.random.default_rng(1)) is None
    assert moved(nowhere.function, standard(2)) is None


def test_frozen_chains_have_not_arrived(rng):
    """Started at a point of their own each, they would look like independent draws."""
    apart = np.broadcast_to(rng.standard_normal((1, N_CHAINS, 3)), (50, N_CHAINS, 3))
    together = np.broadcast_to(np.repeat(rng.standard_normal((1, N_STARTS, 3)), 16, axis=1), apart.shape)
    assert (nested_rhat(apart, N_STARTS) < 1.1).all()
    assert (nested_rhat(together, N_STARTS) > 1e6).all()
    assert (mixing_of(together, N_STARTS).rhat > 1e6).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_independent_draws_have_arrived(seed):
    draws = np.random.default_rng(seed).standard_t(2, size=(60, N_CHAINS, 40))
    mixing = mixing_of(draws, N_STARTS)
    assert (mixing.rhat < MOST_RHAT).all()
    assert (mixing.trend < most_trend(40)).all()
    assert_allclose(mixing.memory, 0.0, atol=MOST_ERRORS / np.sqrt(60 * N_CHAINS))
    assert min(effective_sizes(draws, mixing.memory)[:2]) > 0.8 * 60 * N_CHAINS
    # Means of superchains scatter as those of so many draws; eight of them tell it within a factor.
    assert 0.3 < worth_of(draws[..., :1].clip(-3, 3), N_STARTS) / (60 * N_CHAINS) <= 1.0


@pytest.mark.parametrize("of", ["place", "spread"])
def test_superchains_that_differ_have_not_arrived(of, rng):
    """In place, or, with the same mean, in spread."""
    draws = rng.standard_normal((60, N_CHAINS, 1))
    start = np.repeat(rng.uniform(-1.0, 1.0, N_STARTS), 16)[:, None]
    draws = draws + 0.5 * start if of == "place" else draws * np.exp(0.5 * start)
    assert mixing_of(draws, N_STARTS).rhat[0] > MOST_RHAT


@pytest.mark.parametrize("of", ["place", "spread"])
def test_chains_that_drift_together_have_not_arrived(of, rng):
    """Superchains are alike at all times, so that R-hat says nothing."""
    draws, time = rng.standard_normal((60, N_CHAINS, 1)), np.linspace(-1.0, 1.0, 60)[:, None, None]
    draws = draws + 0.2 * time if of == "place" else draws * np.exp(0.2 * time)
    mixing = mixing_of(draws, N_STARTS)
    assert mixing.rhat[0] < MOST_RHAT
    assert mixing.trend[0] > most_trend(100)


@pytest.mark.parametrize("n_stays", [30, 20, 15])
def test_a_chain_that_comes_late_to_a_peak_is_seen(n_stays, rng):
    """These are .4 to .2 % of all draws, and hide among the highest hundredth."""
    logp = -rng.exponential(size=(60, N_CHAINS))
    logp[-n_stays:, 5] += 7.0
    settled = {"rhat": 1.0, "trend": 0.0, "most_trend": 4.0, "bulk": 4e3, "tail": 4e3, "n_quantities": 1, "n_draws": 60}
    checks = MovedChecks(**settled, n_chains=N_CHAINS, n_starts=8, n_gradients=1, acceptance=0.8, peak=peak_size(logp))
    assert [c.name for c in checks.conditions if not c.holds] == ["peak size"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("fitted", ["right", "wide and turned", "narrow"])
def test_fifty_correlated_coordinates(fitted, seed):
    cov, q = correlated(50, seed)
    of_fit = {"right": cov, "wide and turned": 9.0 * q @ cov @ q.T, "narrow": cov / 9.0}[fitted]
    fit = FullState(np.full(50, 0.3), np.linalg.cholesky(of_fit))
    ended = moved(gaussian(np.linalg.inv(cov)), fit, seed=seed)
    checks, sd = ended.checks, np.sqrt(np.diag(cov))
    assert checks.is_exact
    assert checks.n_gradients < 150_000
    x = ended.draws.x.reshape(-1, 50)
    assert_allclose(x.mean(axis=0) / sd, 0.0, atol=MOST_ERRORS / np.sqrt(checks.bulk))
    assert_allclose(x.std(axis=0) / sd, 1.0, atol=MOST_ERRORS / np.sqrt(2.0 * checks.bulk))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_funnel_is_right_where_it_is_said_to_be(seed):
    """A Gaussian fit knows nothing of its neck and its mouth."""
    ended = moved(funnel, standard(6), seed=seed, most=500_000)
    v = ended.draws.x[..., 0].ravel()
    if ended.checks.is_exact:
        assert v.std() == pytest.approx(3.0, abs=3.0 * MOST_ERRORS / np.sqrt(2.0 * ended.checks.effective_size))
    else:
        assert v.std() == pytest.approx(3.0, abs=1.0)


def test_chains_that_are_always_refused_have_not_arrived():
    """A gradient that leads nowhere."""

    def cliffs(x):
        return -0.5e12 * np.sum((x - np.round(x, 3)) ** 2, axis=1), 1e9 * np.sin(1e9 * x)

    ended = moved(cliffs, standard(2), most=200_000)
    assert not ended.checks.is_exact


def one_stuck(d):
    """Return a Gaussian in which the fourth of all chains is refused everywhere but where it, or another one, is."""
    inside, places = gaussian(np.eye(d)), []

    def function(x):
        logp, grad = inside(x)
        if len(x) == N_CHAINS:
            if not places or (np.delete(x, 3, axis=0) == x[3]).all(axis=1).any():
                places.append(x[3].copy())
            if not (x[3] == places[-1]).all():
                logp[3] = np.nan
        return logp, grad

    return function


@pytest.mark.parametrize("seed", [1, 2])
def test_a_chain_that_has_not_left_where_it_began_is_seen(seed, monkeypatch):
    """Ranks of all draws hardly tell that one of 128 chains is at a log p far below that of the others."""
    d = 40
    with monkeypatch.context() as patched:
        patched.setattr(Chains, "join", lambda self, stuck, n_starts: None)
        kept = moved(one_stuck(d), standard(d, 3.0), seed=seed, most=400_000).checks
    assert max(kept.rhat / MOST_RHAT, kept.trend / kept.most_trend) <= 1.0
    assert kept.n_far == kept.n_draws
    assert not kept.is_exact
    assert "far below that of all others" in " ".join(kept.failures)
    freed = moved(one_stuck(d), standard(d, 3.0), seed=seed, most=400_000)
    assert freed.checks.is_exact
    assert freed.draws.logp.min() > -0.5 * d - 10.0 * np.sqrt(d)


def test_a_limit_of_gradients_ends_it_with_figures():
    target = Target(funnel)
    ended = moved_until_arrived(
        target, [standard(6)], N_CHAINS, np.random.default_rng(1), may_go_on=lambda n: n <= 100_000, label="x{}".format
    )
    checks = ended.checks
    assert not checks.is_exact
    # A round may take smaller steps than was expected of it.
    assert checks.n_gradients <= target.n_gradients <= 150_000
    assert "Not reliable: chains that began" in checks.sentence
    assert checks.failures
    if checks.rhat > MOST_RHAT:
        assert f"nested R-hat of {checks.slowest} is {checks.rhat:.3f}" in checks.sentence
    else:
        assert min(checks.bulk, checks.tail) < ENOUGH


def test_quantities_have_to_arrive_as_well():
    """What sees a coordinate that no chain has forgotten, where single coordinates show nothing."""
    kept = []

    def by_start(theta):
        kept.append(len(theta))
        start = np.tile(np.repeat(np.arange(N_STARTS), 16), len(theta) // N_CHAINS)
        return start[:, None] + np.random.default_rng(1).standard_normal((len(theta), 1))

    fine = moved(gaussian(np.eye(3)), standard(3))
    assert fine.checks.is_exact
    assert fine.checks.n_quantities == 4
    not_yet = moved(gaussian(np.eye(3)), standard(3), quantities=by_start, label="q{}".format, most=150_000)
    assert kept
    assert not not_yet.checks.is_exact
    assert not_yet.checks.slowest == "q4"
    nothing = moved(gaussian(np.eye(3)), standard(3), quantities=lambda theta: np.full((len(theta), 2), np.nan))
    assert nothing.checks.is_exact
    assert nothing.checks.n_quantities == 4


def test_the_same_seed_gives_the_same_draws():
    one, same, other = (moved(banana, standard(2), seed=seed, most=30_000).draws.x for seed in (1, 1, 2))
    assert_array_equal(one, same)
    assert one.shape != other.shape or (one != other).any()


@pytest.fixture
def rng():
    return np.random.default_rng(1)


#: Parts of the posterior that are compared with what they should be.
PARTS = np.array([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])


def spiked(width):
    """Return half a standard normal, and half one that is narrow."""

    def function(x):
        logs = np.array([-0.5 * (x[:, 0] / s) ** 2 - np.log(s) for s in (1.0, width)])
        logp = np.logaddexp(*logs)
        part = np.exp(logs - logp)
        return logp, -(part[0] + part[1] / width**2)[:, None] * x

    return function


def check_distribution(ended, values, cdf):
    """Below each quantile is as much as there should be, within Monte Carlo error: (n_draws, n_chains, k)."""
    u = cdf(values).reshape(-1, values.shape[-1])
    below = (u[:, None] < PARTS[:, None]).mean(axis=0)
    error = np.sqrt(PARTS * (1.0 - PARTS) / ended.checks.effective_size)
    assert_allclose((below - PARTS[:, None]) / error[:, None], 0.0, atol=MOST_ERRORS)


@pytest.mark.parametrize("seed", [1, 2])
def test_heavy_tails_have_their_quantiles(seed):
    """Eight coordinates of Student's t with 1.5 degrees of freedom: there is no variance."""

    def student(x, nu=1.5):
        return -0.5 * (nu + 1.0) * np.log1p(x**2 / nu).sum(axis=1), -(nu + 1.0) * x / (nu + x**2)

    ended = moved(student, standard(8), seed=seed)
    assert ended.checks.tells_limits
    assert not ended.checks.is_reliable
    check_distribution(ended, ended.draws.x, lambda x: stats.t.cdf(x, 1.5))


@pytest.mark.parametrize("seed", [1, 2])
def test_cusps_have_their_quantiles(seed):
    ended = moved(lambda x: (-np.abs(x).sum(axis=1), -np.sign(x)), standard(20), seed=seed)
    assert ended.checks.is_exact
    check_distribution(ended, ended.draws.x, stats.laplace.cdf)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_narrow_ridge_is_followed(seed):
    """A correlation of .9999 that the fit knows nothing of."""
    precision = np.linalg.inv([[1.0, 0.9999], [0.9999, 1.0]])

    def ridge(x):
        pulled = x @ precision
        return -0.5 * np.sum(x * pulled, axis=1), -pulled

    ended = moved(ridge, standard(2), seed=seed, most=4_000_000)
    assert ended.checks.is_exact
    x = ended.draws.x
    across = (x[..., :1] - x[..., 1:]) / np.sqrt(2.0 * (1.0 - 0.9999))
    check_distribution(ended, np.concatenate([x, across], axis=2), stats.norm.cdf)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_boundary_with_mass_at_it_is_right_or_refused(seed):
    def exponential(x):
        inside = (x > 0.0).all(axis=1)
        return np.where(inside, -x.sum(axis=1), -np.inf), np.where(inside[:, None], -1.0, np.nan)

    ended = moved(exponential, DiagonalState.from_scale(np.ones(3), np.ones(3)), seed=seed)
    assert (ended.draws.x > 0.0).all()
    if ended.checks.is_exact:
        check_distribution(ended, ended.draws.x, stats.expon.cdf)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("width", [0.1, 0.03])
def test_a_spike_in_a_slab_is_right_or_refused(width, seed):
    """Half of the mass is in a place where steps have to be a tenth, or less, of what they are elsewhere."""
    ended = moved(spiked(width), standard(1), seed=seed, most=1_000_000)
    if ended.checks.is_exact:
        check_distribution(ended, ended.draws.x, lambda x: 0.5 * (stats.norm.cdf(x) + stats.norm.cdf(x, 0.0, width)))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_peak_that_is_passed_by_is_seen(seed):
    """Half of the mass, where trajectories are refused: all chains agree on the other half."""
    ended = moved(spiked(0.001), standard(1), seed=seed, most=400_000)
    assert not ended.checks.is_exact
    assert ended.checks.failures


@pytest.mark.parametrize("seed", [1, 2])
def test_the_error_of_a_limit_is_that_of_the_density_there(seed):
    """Of 5 % of an exponential distribution, the root of p (1 - p) / n over the density, 0.05."""
    x = np.random.default_rng(seed).exponential(size=(200, 64, 1))
    size = effective_sizes(x, np.zeros(1))
    assert_allclose(size.limit_error, np.sqrt(0.05 * 0.95 / size.tail) / 0.05, rtol=0.25)
