"""Straight tails of the logarithms of scales: the map that squeezes them, the folded density, how they are found."""

import numpy as np
import pytest

from numpy.testing import assert_allclose
from scipy import integrate, stats
from scipy.special import logsumexp

from pymc_ngvi.marginal.tails import Bend, Ratio, Tail, find_tails

BENDS = [
    Bend((Tail(0, -1, 0.7, -0.4),)),
    Bend((Tail(0, 1, 0.25, 1.3),)),
    Bend((Tail(1, -1, 1.0, 0.2), Tail(0, 1, 0.5, -1.0))),
]
FUNNEL = Bend((Tail(1, -1, 2.0, -0.3),), (Ratio(0, 1, 0.2),))


@pytest.mark.parametrize("bend", [Bend(), *BENDS])
def test_forward_and_inverse(bend):
    g = np.random.default_rng(1).normal(size=(200, 3)) * [3.0, 5.0, 2.0]
    g[0] = [40.0, -40.0, 1.0]
    g[1] = -g[0]
    y = bend.forward(g)
    assert_allclose(bend.inverse(y), g, rtol=1e-8, atol=1e-8)
    at = [t.at for t in bend.tails]
    assert (y[:, at] >= 0.0).all()
    others = np.setdiff1d(np.arange(3), at)
    assert_allclose(y[:, others], g[:, others])
    # What is on the other side of the fold is the same point.
    mirrored = y.copy()
    mirrored[:, at] *= -1.0
    assert_allclose(bend.inverse(mirrored), g, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("side", [-1, 1])
def test_the_bulk_is_left_as_it_is_and_the_tail_is_squeezed(side):
    """y = -+ (g - corner) on one side; on the other it vanishes as fast as the tail does."""
    rate, corner = 0.8, 0.5
    bend = Bend((Tail(0, side, rate, corner),))
    far = np.array([[20.0], [60.0]])
    assert_allclose(bend.forward(corner - side * far), far, rtol=1e-6)
    assert_allclose(bend.forward(corner + side * far), np.exp(-rate * far) / rate, rtol=1e-6)


def test_inverse_is_finite_at_the_fold():
    bend = BENDS[0]
    g = bend.inverse(np.array([[0.0], [1e-320], [-1e-320]]))
    assert np.isfinite(g).all()


def student(y):
    return stats.t.logpdf(y[:, 0], 5.0, 1.4, 1.1)


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_folded_density_integrates_to_1(side, rate):
    bend = Bend((Tail(0, side, rate, 0.3),))
    total = sum(
        integrate.quad(
            lambda g: np.exp(bend.log_density(student, np.array([[g]]))[0]), low, low + 10.0, epsabs=1e-9, limit=200
        )[0]
        for low in np.arange(-200.0, 200.0, 10.0)
    )
    # What is left is beyond the ends: t tails with 5 degrees of freedom, and exp(-60) at the least.
    assert_allclose(total, 1.0, atol=1e-6)


def test_the_folded_density_integrates_to_1_in_two_dimensions():
    bend = BENDS[2]
    q = stats.multivariate_normal([0.6, 1.2], [[1.0, 0.5], [0.5, 2.0]])
    line = np.linspace(-45.0, 45.0, 601)
    g = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, 2)
    density = np.exp(bend.log_density(q.logpdf, g))
    assert_allclose(density.sum() * (line[1] - line[0]) ** 2, 1.0, atol=1e-6)


def test_the_folded_density_is_that_of_mapped_draws():
    bend = Bend((Tail(0, -1, 0.6, -0.4),))
    rng = np.random.default_rng(3)
    draws = bend.inverse(stats.t.rvs(5.0, 1.4, 1.1, size=(100_000, 1), random_state=rng))[:, 0]
    edges = np.array([-12.0, -6.0, -3.0, -1.0, 0.0, 1.0, 2.0, 5.0])
    counts = np.histogram(draws, edges)[0] / len(draws)
    for low, high, part in zip(edges[:-1], edges[1:], counts, strict=True):
        grid = np.linspace(low, high, 401)
        expected = np.trapezoid(np.exp(bend.log_density(student, grid[:, None])), grid)
        assert abs(part - expected) < 5.0 * np.sqrt(expected / len(draws))


def test_a_ratio_goes_there_and_back_and_its_density_integrates_to_1():
    g = np.random.default_rng(1).normal(size=(200, 3)) * [3.0, 2.0, 2.0]
    y = FUNNEL.forward(g)
    assert_allclose(FUNNEL.inverse(y), g, rtol=1e-8, atol=1e-8)
    assert_allclose(y[:, 0], g[:, 0] / np.exp(g[:, 1] - 0.2))
    # The middle of the density in y, where its fold is far from it.
    q = stats.multivariate_normal([0.6, 2.2], [[1.0, 0.3], [0.3, 0.2]])
    wide, line = np.linspace(-200.0, 200.0, 2_001), np.linspace(-1.5, 4.5, 301)
    points = np.stack(np.meshgrid(wide, line, indexing="ij"), axis=-1).reshape(-1, 2)
    density = np.exp(FUNNEL.log_density(q.logpdf, points))
    assert_allclose(density.sum() * (wide[1] - wide[0]) * (line[1] - line[0]), 1.0, atol=1e-5)


def test_moments_after_ratios_are_taken_are_those_of_draws():
    bend, mean, cov = Bend((), (Ratio(0, 1, 0.5),)), np.array([0.4, 0.3]), np.array([[0.04, 0.01], [0.01, 0.01]])
    draws = bend.forward(np.random.default_rng(2).multivariate_normal(mean, cov, 200_000))
    found_mean, found_cov = bend.normal(mean, cov)
    # To first order: what is left is of the order of the variances.
    assert_allclose(found_mean, draws.mean(axis=0), atol=0.015)
    assert_allclose(found_cov, np.cov(draws.T), rtol=0.06)


def test_without_tails_nothing_changes():
    g = np.random.default_rng(4).normal(size=(5, 2))
    assert Bend().forward(g) is g
    assert Bend().inverse(g) is g
    assert_allclose(Bend().log_density(student, g), student(g))


def test_a_density_with_a_straight_tail_is_regular_in_y():
    """log m = tau - e^tau: log of an exponential variable; folded, weights stay bounded down the tail."""
    bend = Bend((Tail(0, -1, 1.0, -1.0),))
    g = np.linspace(-200.0, -5.0, 50)[:, None]
    log_ratio = (g[:, 0] - np.exp(g[:, 0])) - bend.log_density(student, g)
    assert np.ptp(log_ratio) < 0.5
    unfolded = (g[:, 0] - np.exp(g[:, 0])) - student(g)
    assert np.ptp(unfolded) > 100.0


# --- how they are found -----------------------------------------------------------------------------------------------


def log_of_half_normal(t):
    """Log density of log tau, tau half normal: a slope of 1 far on the left."""
    return t - 0.5 * np.exp(2.0 * np.clip(t, -300.0, 300.0))


def eight_schools_like(t):
    """Where the data say little against tau = 0: flat likelihood times the density of log tau, whose slope is 1."""
    return t - np.log1p(np.exp(2.0 * np.clip(t, -300.0, 300.0))) * 1.5


def test_an_exponential_tail_of_a_log_scale_is_found():
    for f, mean, sd in [(log_of_half_normal, -0.6, 0.8), (eight_schools_like, -0.4, 1.0)]:
        bend = find_tails(lambda g, f=f: f(g[:, 1]) - 0.5 * g[:, 0] ** 2, np.array([0.0, mean]), np.array([1.0, sd]))
        [tail] = bend.tails
        assert (tail.at, tail.side) == (1, -1)
        assert tail.rate == pytest.approx(1.0, abs=0.01)
        assert mean - 2.0 * sd < tail.corner < mean


def test_a_steep_tail_is_found():
    """The logarithm of a gamma variable of shape 4 falls with slope 4, which is twice its standard deviation."""
    f, mean, sd = (lambda t: 4.0 * t - np.exp(np.minimum(t, 50.0))), np.log(4.0), 0.48
    [tail] = find_tails(lambda g: f(g[:, 0]), np.array([mean]), np.array([sd])).tails
    assert (tail.side, tail.rate) == (-1, 1.0)  # in y, its density is that of a power


def test_tails_are_looked_for_after_ratios_are_taken():
    """Along its axis at 0.5, the second coordinate has no tail at all: the first one is where its scale is."""

    def f(g):
        return stats.norm.logpdf(g[:, 0], 0.0, np.exp(g[:, 1])) + log_of_half_normal(g[:, 1])

    ratio = Ratio(0, 1, -0.6)
    mean = Bend((), (ratio,)).forward(np.array([[0.5, -0.6]]))[0]
    [tail] = find_tails(f, mean, np.array([0.55, 0.8]), (ratio,)).tails
    assert (tail.at, tail.side, tail.rate) == (1, -1, pytest.approx(1.0, abs=0.01))
    assert find_tails(f, np.array([0.5, -0.6]), np.array([0.55, 0.8])).tails == ()


def test_a_tail_on_the_right_is_found():
    bend = find_tails(lambda g: log_of_half_normal(-g[:, 0]), np.array([0.6]), np.array([0.8]))
    assert [(t.at, t.side) for t in bend.tails] == [(0, 1)]


@pytest.mark.parametrize("at", [0, 1])
def test_a_gaussian_has_no_tail(at):
    assert find_tails(lambda g: -0.5 * (g**2).sum(axis=1), np.zeros(2), np.ones(2)).tails == ()


@pytest.mark.parametrize("df", [5.0, 7.0, 30.0])
def test_a_student_t_has_no_tail(df):
    """Polynomial tails level out: proposals have such tails themselves."""
    assert find_tails(lambda g: stats.t.logpdf(g[:, 0], df), np.zeros(1), np.ones(1)).tails == ()


def test_a_laplace_distribution_with_the_mass_at_the_kink_is_not_flat():
    """Tails as steep as a Gaussian's where that has little left: a t whose sd is that of the bulk covers them."""
    assert find_tails(lambda g: -2.0 * np.abs(g[:, 0]), np.zeros(1), np.ones(1)).tails == ()


def test_a_tail_far_below_the_top_does_not_matter():
    """It begins 30 nats down: no draw gets there."""

    def f(g):
        return logsumexp([-0.5 * g[:, 0] ** 2, 0.5 * g[:, 0] - 30.0 - np.logaddexp(0.0, 40.0 * g[:, 0])], axis=0)

    assert find_tails(f, np.zeros(1), np.ones(1)).tails == ()


def test_values_that_are_not_finite_give_no_tail():
    assert find_tails(lambda g: np.where(g[:, 0] < -5.0, -np.inf, g[:, 0]), np.zeros(1), np.ones(1)).tails == ()


def test_at_most_five_tails_the_highest_of_them():
    heights = np.array([-1.0, -4.0, -2.0, -3.0, -6.0, -0.5, -5.0])

    def f(g):
        # Each falls on the left with slope .3 from a shelf of its own.
        return sum(
            np.logaddexp(-0.5 * g[:, i] ** 2, 0.3 * np.minimum(g[:, i], 0.0) + h - 5.0 * np.maximum(g[:, i], 0.0))
            for i, h in enumerate(heights)
        )

    bend = find_tails(f, np.zeros(7), np.ones(7))
    assert [t.at for t in bend.tails] == [5, 0, 2, 3, 1]
