"""Chains that begin at a fit: they find the posterior, and are never said to have arrived where they have not."""

import numpy as np
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import ndtri

from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.moves.basins import Counted
from pymc_ngvi.moves.coordinates import ChainCoordinates
from pymc_ngvi.moves.leapfrog import WhitenedMomenta, phase_points_at, trajectory
from pymc_ngvi.moves.rounds import (
    N_STARTS,
    Chains,
    effective_sizes,
    height_above,
    mixing_of,
    most_trend,
    moved_until_arrived,
    nested_rhat,
    peak_size,
    starts_of,
    worth_of,
)
from pymc_ngvi.moves.verdict import LEAST_SIZE, MOST_HEIGHT, MOST_RHAT, MovedChecks

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


def two_modes(x, apart=6.0):
    """Normals of standard deviation 1 with weights .7 and .3."""
    centre = np.zeros(x.shape[1])
    centre[0] = 0.5 * apart
    logs = np.array([np.log(p) - 0.5 * np.sum((x - c) ** 2, axis=1) for p, c in ((0.7, centre), (0.3, -centre))])
    logp = np.logaddexp(*logs)
    p = np.exp(logs - logp)[..., None]
    return logp, -p[0] * (x - centre) - p[1] * (x + centre)


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


# --- coordinates ------------------------------------------------------------------------------------------------------


def test_coordinates_whiten_what_the_gaussian_does_not(rng):
    d = 6
    cov, q = correlated(d, 1)
    fit = FullState(np.ones(d), np.linalg.cholesky(4.0 * q @ cov @ q.T))
    x = 3.0 + rng.standard_normal((20_000, d)) @ np.linalg.cholesky(cov).T
    found = ChainCoordinates.of(fit).refitted(x, len(x))
    w = found.w(x)
    assert_allclose(w.mean(axis=0), 0.0, atol=1e-10)
    # What is within the edge of noise of a thousand draws stays as it is.
    assert np.linalg.norm(np.cov(w.T) - np.eye(d), 2) < 0.25
    step = 0.5 * rng.standard_normal((3, d))
    assert_allclose(found.w(x[:3] + found.velocity(step)), w[:3] + step, atol=1e-10)
    grad = rng.standard_normal((3, d))
    assert_allclose(np.sum(found.slope(grad) * step, axis=1), np.sum(grad * found.velocity(step), axis=1))


@pytest.mark.parametrize(("d", "n"), [(40, 200), (300, 60)])
def test_noise_is_no_direction(d, n, rng):
    """Of few draws of many coordinates, no eigenvalue stands out; a direction that is ten times as wide does."""
    x = rng.standard_normal((n, d))
    assert ChainCoordinates.of(standard(d)).refitted(x, n).directions.shape[1] == 0
    along = rng.standard_normal(d)
    along /= np.linalg.norm(along)
    x += 9.0 * (x @ along)[:, None] * along
    found = ChainCoordinates.of(standard(d)).refitted(x, n)
    assert np.linalg.norm(found.w(x), 2) ** 2 / n < 1.3 * (1.0 + np.sqrt(d / n)) ** 2
    assert found.directions.shape[1] >= 1


# --- trajectories -----------------------------------------------------------------------------------------------------


def test_trajectories_leave_a_posterior_as_it_is(rng):
    """Steps of a size that is often refused: without acceptance, variances would grow."""
    target, metric = Target(gaussian(np.eye(3))), WhitenedMomenta.by(standard(3))
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


def test_starts_are_at_all_fits():
    far = DiagonalState.from_scale(np.full(2, 100.0), np.ones(2))
    starts = starts_of(Target(gaussian(np.eye(2))), [standard(2), far], N_STARTS, np.random.default_rng(1))
    assert (starts.mean(axis=1) > 50.0).sum() == N_STARTS // 2


# --- whether they have arrived ----------------------------------------------------------------------------------------


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
    assert min(effective_sizes(draws, mixing.memory)) > 0.8 * 60 * N_CHAINS
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


def test_a_chain_that_stays_in_a_peak_is_seen(rng):
    """One in 128: R-hat and the effective sizes of places say nothing of it."""
    logp = -rng.exponential(size=(60, N_CHAINS))
    assert peak_size(logp) > 0.5 * logp.size
    logp[:, 5] += 7.0
    assert (mixing_of(logp[..., None], N_STARTS).rhat < MOST_RHAT).all()
    assert peak_size(logp) < LEAST_SIZE
    assert peak_size(np.zeros((60, N_CHAINS))) == np.inf


@pytest.mark.parametrize("n_stays", [30, 20, 15])
def test_a_chain_that_comes_late_to_a_peak_is_seen(n_stays, rng):
    """These are .4 to .2 % of all draws, and hide among the highest hundredth."""
    logp = -rng.exponential(size=(60, N_CHAINS))
    logp[-n_stays:, 5] += 7.0
    settled = {"rhat": 1.0, "trend": 0.0, "most_trend": 4.0, "bulk": 4e3, "tail": 4e3, "n_quantities": 1, "n_draws": 60}
    checks = MovedChecks(**settled, n_chains=N_CHAINS, n_starts=8, n_gradients=1, acceptance=0.8, peak=peak_size(logp))
    assert [c.name for c in checks.conditions if not c.holds] == ["peak size"]


def test_log_p_on_the_way_is_near_that_of_draws(rng):
    """Points on the way are draws of the same distribution, six times as many; a peak that is passed by is not."""
    for seed in range(20):
        on_the_way = np.random.default_rng(seed).exponential(size=6 * 60 * N_CHAINS)
        assert height_above(on_the_way[: 60 * N_CHAINS], on_the_way.max()) < MOST_HEIGHT
    logp = -rng.exponential(size=(60, N_CHAINS))
    assert height_above(logp, 7.0) > MOST_HEIGHT
    assert height_above(np.zeros((60, N_CHAINS)), 0.0) == 0.0


def test_fewer_are_refused_where_trajectories_diverge():
    """In the neck of a funnel; and no fewer where none diverges."""
    refused = {}
    for function in (funnel, gaussian(np.eye(6))):
        start = 0.5 * np.random.default_rng(1).standard_normal((N_CHAINS, 6))
        chains = Chains(Target(function), ChainCoordinates.of(standard(6)), start, np.random.default_rng(2))
        first = chains.refused
        for _ in range(6):
            chains.run(40, n_adapting=16)
        refused[function] = chains.refused / first
        # steps follow what is aimed at
        assert 1.0 - chains.acceptance == pytest.approx(chains.refused, rel=0.9, abs=0.05)
    of_funnel, of_gaussian = refused.values()
    assert of_funnel < 0.5
    assert of_gaussian == 1.0


@pytest.mark.parametrize(("n_high", "arrives"), [(1, True), (10**9, False)])
def test_log_p_on_the_way_counts_in_the_rounds_that_are_kept(n_high, arrives, monkeypatch):
    """What was seen before them, where chains began, tells nothing of where they are."""
    evaluate, calls = Counted.logp_grad, []

    def seen(self, theta):
        result = evaluate(self, theta)
        calls.append(1)
        if len(calls) <= n_high:
            self.highest = 1e6
        return result

    monkeypatch.setattr(Counted, "logp_grad", seen)
    checks = moved(gaussian(np.eye(6)), standard(6), most=200_000).checks
    assert checks.is_exact == arrives
    assert (checks.height > MOST_HEIGHT) != arrives


def test_longer_trajectories_count_before_they_are_taken(monkeypatch):
    """Rounds are judged, have not arrived, and trajectories become so long that the next one is too dear."""
    most, refit, n_refits = 600_000, Chains.refit, []

    def lengthened(self, x, worth):
        refit(self, x, worth)
        n_refits.append(1)
        if len(n_refits) > 2:
            self.length = 1e3

    monkeypatch.setattr(Chains, "refit", lengthened)
    checks = moved(funnel, standard(6), most=most).checks
    assert not checks.is_exact
    assert len(n_refits) == 3
    assert checks.n_gradients <= most


def test_what_is_constant_or_unknown_is_left_out(rng):
    draws = rng.standard_normal((20, N_CHAINS, 4))
    draws[..., 1], draws[3, 5, 2], draws[3, 5, 3] = 2.0, np.nan, np.inf
    for measured in mixing_of(draws, N_STARTS):
        assert_array_equal(np.isnan(measured), [False, True, True, False])


# --- targets ----------------------------------------------------------------------------------------------------------


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
def test_a_banana(seed):
    ended = moved(banana, standard(2), seed=seed)
    x, size = ended.draws.x.reshape(-1, 2), ended.checks.effective_size
    assert ended.checks.is_exact
    assert x[:, 0].std() == pytest.approx(1.0, abs=MOST_ERRORS / np.sqrt(2.0 * size))
    # var(b) = .3 + var(a^2) / 4; its square is a polynomial of degree 8, with a variance of some 15.
    assert x[:, 1].var() == pytest.approx(0.8, abs=MOST_ERRORS * np.sqrt(5.0 / size))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_funnel_is_right_where_it_is_said_to_be(seed):
    """A Gaussian fit knows nothing of its neck and its mouth."""
    ended = moved(funnel, standard(6), seed=seed, most=500_000)
    v = ended.draws.x[..., 0].ravel()
    if ended.checks.is_exact:
        assert v.std() == pytest.approx(3.0, abs=3.0 * MOST_ERRORS / np.sqrt(2.0 * ended.checks.effective_size))
    else:
        assert v.std() == pytest.approx(3.0, abs=1.0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("known", ["one wide fit", "both modes"])
def test_two_modes_are_never_reliable_and_wrong(known, seed):
    """Chains cross between them now and then: part of the time, no two superchains agree on weights."""
    wide, centre = DiagonalState.from_scale(np.zeros(2), np.array([3.0, 1.0])), np.array([3.0, 0.0])
    fits = [wide] if known == "one wide fit" else [DiagonalState.from_scale(c, np.ones(2)) for c in (centre, -centre)]
    ended = moved(two_modes, *fits, seed=seed, most=200_000)
    weights = np.repeat(ended.checks.mode_weights or (1.0,), ended.draws.x.shape[1] // ended.checks.n_modes)
    weight = np.average((ended.draws.x[..., 0] > 0.0).mean(axis=0), weights=weights)
    assert not ended.checks.is_exact or abs(weight - 0.7) < 0.1


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
    assert "not arrived" in checks.sentence
    assert checks.failures
    if checks.rhat > MOST_RHAT:
        assert f"nested R-hat of {checks.slowest} is {checks.rhat:.3f}" in checks.sentence
    else:
        assert min(checks.bulk, checks.tail) < LEAST_SIZE


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


def test_the_length_of_trajectories_is_about_a_quarter_of_a_period():
    """Of a standard normal, means are forgotten fastest after half a period, squares after a quarter."""
    chains = Chains(Target(gaussian(np.eye(10))), ChainCoordinates.of(standard(10)),
                    np.random.default_rng(1).standard_normal((N_CHAINS, 10)), np.random.default_rng(2))  # fmt: skip
    chains.run(40, n_adapting=20)
    draws = chains.run(20)
    chains.refit(draws.x.reshape(-1, 10), 500.0)
    assert 0.8 < chains.length < 2.4
    assert 0.6 < chains.acceptance <= 1.0


def test_changes_by_chance_are_allowed_for():
    assert most_trend(100) > most_trend(1) > -ndtri(0.005)


@pytest.fixture
def rng():
    return np.random.default_rng(1)
