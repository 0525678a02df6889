"""What nested posteriors are made of: modes, predictions, conditional fits, and what their ELBO lacks."""

from types import SimpleNamespace

import numpy as np
import pytest

from latent_models import counts, level, one_effect, process, shifted
from scipy import integrate, sparse, stats

from pymc_ngvi import LogDensity
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.families.fill import step_seconds
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.marginal.fitting import Hopeless
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.marginal.tails import Bend, Ratio, Tail
from pymc_ngvi.nested.emulator import Emulated, Kriging
from pymc_ngvi.nested.exploring import _tell
from pymc_ngvi.nested.found import n_wanted
from pymc_ngvi.nested.log_marginal import LatentMarginal
from pymc_ngvi.nested.mode import _Climb, find_mode
from pymc_ngvi.nested.rounds import Rounds
from pymc_ngvi.nested.seconds import n_values_of, nested_seconds
from pymc_ngvi.rows.seen import ManyRules, ManySeen


class Counted:
    """A function of one point as one of many; counts the points, and the calls."""

    def __init__(self, function):
        self.function, self.n, self.n_calls = function, 0, 0

    def __call__(self, points):
        self.n += len(points)
        self.n_calls += 1
        return np.array([self.function(x) for x in points])


# --- the mode ---

PRECISION = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 5.0]])


def quadratic(x):
    apart = x - np.array([3.0, -2.0, 0.5])
    return -0.5 * apart @ PRECISION @ apart


def test_the_mode_of_a_quadratic_and_its_curvature():
    function = Counted(quadratic)
    mode = find_mode(function, np.zeros(3), np.full(3, 0.5))
    assert quadratic(mode.at) > -0.02  # what a step must promise
    np.testing.assert_allclose(mode.cov, np.linalg.inv(PRECISION), rtol=1e-6, atol=1e-8)
    assert function.n_calls < 16


def test_the_mode_of_what_is_no_quadratic():
    """Far from the start, and steep on one side."""

    def function(x):
        return -np.exp(-0.8 * x[0]) - 0.4 * x[0] - 2.0 * (x[1] - 0.3 * x[0] ** 2) ** 2

    counted = Counted(function)
    mode = find_mode(counted, np.array([4.0, -1.0]), np.full(2, 0.5))
    best = np.log(2.0) / 0.8
    assert function(mode.at) > function(np.array([best, 0.3 * best**2])) - 0.05
    assert counted.n_calls < 30


def test_slopes_and_bends_are_those_of_the_function():
    at = np.array([1.0, 0.5, -0.5])
    climb = _Climb(Counted(quadratic), at, quadratic(at), np.array([0.3, 2.0, 0.1]))
    np.testing.assert_allclose(climb._slope, -PRECISION @ (at - np.array([3.0, -2.0, 0.5])), rtol=1e-8)
    np.testing.assert_allclose(climb._bend, np.diag(PRECISION), rtol=1e-6)


def test_no_mode_where_the_function_is_not_finite():
    assert find_mode(Counted(lambda x: -np.inf), np.zeros(2), np.ones(2)) is None


@pytest.mark.parametrize("scale", [0.02, 0.5, 20.0])
def test_the_mode_is_found_from_far_whatever_the_scale(scale):
    """As of a log sd that starts at that of 1 where the data are in the hundreds: flat at first, then steep."""
    function = Counted(lambda x: 5.0 * x[0] - 30.0 * np.logaddexp(0.0, x[0] - 8.0))
    mode = find_mode(function, np.zeros(1), np.array([scale]))
    best = 8.0 + np.log(5.0 / 25.0)
    curvature = 30.0 * (5.0 / 30.0) * (25.0 / 30.0)
    assert abs(mode.at[0] - best) < 0.2 / np.sqrt(curvature)
    assert mode.cov[0, 0] == pytest.approx(1.0 / curvature, rel=0.2)


def test_the_mode_keeps_away_from_where_the_function_is_not_finite():
    function = Counted(lambda x: -((x[0] - 1.0) ** 2) if x[0] < 1.5 else np.nan)
    mode = find_mode(function, np.zeros(1), np.ones(1))
    assert abs(mode.at[0] - 1.0) < 0.5


# --- predictions ---


def terms(u):
    i, j = np.triu_indices(u.shape[1])
    return np.concatenate([np.ones((len(u), 1)), u, u[:, i] * u[:, j]], axis=1)


def test_kriging_knows_polynomials_and_its_own_error():
    rng = np.random.default_rng(1)
    known, new = rng.standard_normal((30, 2)), rng.standard_normal((400, 2))

    def function(u):
        return 1.0 - u[:, 0] ** 2 + 0.5 * u[:, 0] * u[:, 1]

    exact = Kriging.of(known, terms(known), function(known), 2.5, 1e-9)
    np.testing.assert_allclose(exact(new, terms(new))[0], function(new), atol=1e-5)

    def wavy(u):
        return function(u) + 0.3 * np.sin(2.0 * u[:, 0])

    fitted = Kriging.of(known, terms(known), wavy(known), 1.5, 1e-9)
    mean, sd = fitted(new, terms(new))
    apart = (mean - wavy(new)) / sd
    inside = np.abs(new).max(axis=1) < 1.5
    assert 0.2 < np.sqrt(np.mean(apart[inside] ** 2)) < 3.0
    np.testing.assert_allclose(fitted(known, terms(known))[0], wavy(known), atol=1e-4)


def emulated(function, bend=None, most=100):
    bend = bend or Bend()
    result = Emulated(function, most)
    result.standardise(Whitening.by(bend, np.zeros(2), np.eye(2)), bend)
    return result


def test_few_values_are_evaluated_and_the_others_predicted():
    def function(x):
        return -0.5 * x @ x - 0.1 * x[0] ** 3 / (1.0 + 0.1 * x[0] ** 2)

    counted = Counted(function)
    values = emulated(counted)
    points = np.random.default_rng(2).standard_normal((1_000, 2))
    found = values(points)[0]
    expected = np.array([function(x) for x in points])
    high = expected > expected.max() - 4.0
    assert counted.n < 60
    assert np.std(found[high] - expected[high]) < 0.06
    assert values.n_evaluated == counted.n


def test_straight_tails_are_predicted_far_out():
    """In the coordinate of a tail, the density is smooth; it is one of g all the same."""

    def function(x):
        return 1.3 * x[0] - np.exp(x[0]) - 0.5 * x[1] ** 2

    bend = Bend((Tail(0, -1, 1.0, -1.0),))
    counted = Counted(function)
    values = emulated(counted, bend)
    points = np.stack([np.linspace(-14.0, 2.0, 400), np.random.default_rng(5).standard_normal(400)], axis=1)
    found = values(points)[0]
    expected = np.array([function(x) for x in points])
    weights = np.exp(expected - expected.max())
    apart = found - expected
    assert counted.n < 60
    assert np.sqrt(np.average((apart - np.average(apart, weights=weights)) ** 2, weights=weights)) < 0.1
    far = points[:, 0] < -6.0
    assert np.abs(apart[far]).max() < 0.5


def test_there_is_an_end_to_evaluations():
    counted = Counted(lambda x: float(np.random.default_rng(int(1e6 * abs(x[0]))).normal()))
    emulated(counted, most=25)(np.random.default_rng(3).standard_normal((500, 2)))
    assert 25 <= counted.n < 25 + 8  # some are evaluated together


# --- conditional fits ---


def marginal_of(make, seed=1):
    density = LogDensity(make())
    given = latent_rows(density)
    return density, given, LatentMarginal(given, seed)


def test_log_m_of_a_gaussian_model_is_exact():
    density, _, marginal = marginal_of(level)
    data = density.model.rvs_to_values[density.model["y"]].data
    n = len(data)
    for log_step, log_noise in ((-0.7, 0.1), (-1.5, 0.4), (0.3, -0.5)):
        step, noise = np.exp(log_step), np.exp(log_noise)
        times = np.arange(n)
        cov = 9.0 + step**2 * np.minimum(times[:, None], times) + noise**2 * np.eye(n)
        expected = stats.multivariate_normal(np.zeros(n), cov).logpdf(data)
        expected += (
            stats.halfnorm(scale=1.0).logpdf(step) + log_step + stats.halfnorm(scale=2.0).logpdf(noise) + log_noise
        )
        [found] = marginal(np.array([[log_step, log_noise]]))
        assert found == pytest.approx(expected, abs=1e-6)


def test_what_the_elbo_lacks_is_added():
    """One latent variable, whose integral is known."""
    _, _, marginal = marginal_of(one_effect)
    for log_s in (-1.0, 0.0, 1.0):
        s = np.exp(log_s)

        def density(b, s=s):
            likelihood = np.prod(stats.poisson(np.exp(b)).pmf([0, 1, 4]))
            return stats.norm(0.0, s).pdf(b) * likelihood

        exact = np.log(integrate.quad(density, -12.0, 8.0, epsabs=1e-14)[0])
        exact += stats.halfnorm.logpdf(s) + log_s
        [found] = marginal.at(np.array([[log_s]]))
        elbo = found.value - found.correction
        assert elbo < exact
        error = np.sqrt(2.0 * (exact - elbo) / 512)  # half of the variance of log weights is missing
        assert abs(found.value - exact) < 3.0 * error
        assert 3.0 * error < 0.5 * (exact - elbo) or exact - elbo < 0.1


@pytest.mark.parametrize("make", [process, counts])
def test_a_fit_does_not_hang_on_where_it_begins(make):
    density, given, marginal = marginal_of(make)
    start = density.initial_point()[given.outside][None]
    there = marginal(start + 0.4)
    for step in (0.0, -0.5, 1.0):
        marginal(start + step)
    np.testing.assert_allclose(marginal(start + 0.4), there, atol=5e-3)


@pytest.mark.parametrize("make", [process, counts, level, shifted])
def test_fits_in_a_batch_are_those_of_one_after_the_other(make):
    density, given, marginal = marginal_of(make)
    start = density.initial_point()[given.outside]
    points = start + 0.4 * np.random.default_rng(1).standard_normal((7, len(start)))
    marginal(start[None])
    many = marginal.at(points)
    assert marginal.fits.n_fits == 1  # all others were in batches
    assert marginal.n_fits == 9  # the first one, alone and again in a batch
    for point, found in zip(points, many, strict=True):
        alone = marginal.fits.fit(point, (found.seen,))
        assert found.value - found.correction == pytest.approx(alone.elbo, abs=5e-4)
        # Of each, 1e-4 nats may be missing: sqrt(2e-4) standard deviations.
        np.testing.assert_allclose(found.seen.mean, alone.seen.mean, atol=0.03)
        for one, other in zip(found.seen.covariances, alone.seen.covariances, strict=True):
            np.testing.assert_allclose(one, other, rtol=0.02, atol=1e-9)


def test_a_smaller_natural_step_where_a_full_one_lowers_the_elbo():
    """The precision moves by a part of the way, the mean by that part of the new covariance times the gradient."""
    density, given, marginal = marginal_of(counts)
    start = density.initial_point()[given.outside]
    [known] = marginal.at(start[None])
    fitter = marginal._many._fitter
    rows, _ = given.over.at(start[None])
    mean = known.seen.mean + 1.0
    begun, _ = fitter._begun(rows, ManySeen.of([known.seen._replace(mean=mean)]), ManyRules.of([known.rules]))
    _, direction = fitter._direction(rows, begun)
    new, _ = fitter._stepped(rows, begun, -50.0 * direction)  # a full step goes the wrong way
    d = rows.n_dim
    precision = np.zeros((d, d))
    entries = rows.entries
    precision[entries.rows, entries.cols] = (0.6 * begun.precision + 0.4 * begun.expected.precision)[0]
    precision[entries.cols, entries.rows] = precision[entries.rows, entries.cols]
    grad = rows.maps.transposed_times(begun.expected.slope)[0]
    np.testing.assert_allclose(
        new.mean[0], begun.mean[0] + 0.4 * np.linalg.solve(precision, grad), rtol=1e-8, atol=1e-9
    )
    assert new.elbo[0] > begun.elbo[0]


def test_a_fit_near_others_takes_few_expectations():
    density, given, marginal = marginal_of(process)
    start = density.initial_point()[given.outside]
    marginal(start[None])
    first = marginal._many._fitter.n_expectations
    marginal(start + np.array([0.1, 0.2, 0.3, 0.4])[:, None])
    assert marginal._many._fitter.n_expectations - first <= 4 * 7


def test_seconds_are_those_of_the_form():
    """A process of a thousand points is taken without being asked for; one of four thousand is not."""
    assert _seconds(1_000) < 120.0 < _seconds(4_000)


def test_values_of_hyperparameters_are_as_many_as_a_few_seconds_allow():
    few, many = n_values_of(_sizes(2_000)), n_values_of(_sizes(50))
    assert few == 128
    assert many == 448


def test_seconds_of_forms_agree():
    """A sparse factor that is one dense front takes as long as a dense one, and small fronts more for an operation."""
    n = 600
    dense = Pattern.of(np.ones((n, n)))
    seconds = 4.5e-11 * n**2 * 2 * n
    # Fronts are filled up to 713 columns here, and their numbers are gathered and scattered.
    assert 0.5 < step_seconds(FilledStructure.of(dense)) / seconds < 3.0
    assert 0.5 < step_seconds(ArrowStructure.of(np.full(n, -1))) / seconds < 3.0
    chain = FilledStructure.of(Pattern.of(sparse.diags_array([np.ones(5_000), np.ones(4_999)], offsets=[0, 1])))
    of_chain = step_seconds(chain) / chain.fronts.n_products
    assert of_chain > 20.0 * step_seconds(FilledStructure.of(dense)) / n**3
    # 13 ms were measured for a step, expectations over 10,000 rows included.
    assert 0.003 < step_seconds(chain) < 0.013


def _sizes(n):
    rows = SimpleNamespace(n_rows=2 * n, n_evaluations=2 * n)
    return SimpleNamespace(rows=rows, n_dim=n, summed=None, pattern=None, outside=[0, 1], over=None)


def _seconds(n):
    return nested_seconds(_sizes(n))


@pytest.mark.parametrize("variance", [0.01, 0.4, 0.6, 1.2, 1.7])
def test_corrections_take_as_many_draws_as_their_error_asks_for(variance):
    """Of log-normal weights the mean has the relative error sqrt((exp(variance) - 1) / n)."""
    first = np.sqrt(variance) * np.array([1.0, -1.0] * 32)
    n = n_wanted(first, 1_024)

    def error(m):
        return np.sqrt(np.expm1(variance) / m)

    assert error(n) <= 0.1
    assert n == len(first) or error(n // 2) > 0.1
    assert n_wanted(first, 100) == min(n, 100)


def test_corrections_take_all_draws_where_one_has_no_weight():
    assert n_wanted(np.array([0.1, -np.inf, 0.2, 0.0]), 512) == 512


def test_predictions_are_told_of_the_values_at_which_they_are_farthest_off():
    """By weight, too much and too little alike; not of those that weigh next to nothing."""
    off = np.zeros(40)
    off[[3, 17]] = 2.0, -2.0
    off[30] = 5.0  # where nothing has weight
    log_m = np.where(np.arange(40) == 30, -40.0, 0.0)
    weights = np.exp(log_m)
    pairs = SimpleNamespace(
        g=np.arange(40.0)[:, None], weights=weights / weights.sum(), predicted=log_m + off, log_density=np.zeros(40),
        log_by_elbo=log_m,
    )  # fmt: skip
    told = []
    _tell(SimpleNamespace(tell=lambda g, value: told.append((g.item(), value))), pairs)
    assert [g for g, _ in told][:2] == [3.0, 17.0]
    assert 30.0 not in [g for g, _ in told[:10]]
    assert all(value == log_m[int(g)] for g, value in told)


def test_a_tail_is_straight_in_a_coordinate_that_is_divided_by_a_scale(rng):
    """Not in the hyperparameter itself: a line in that, times a scale far off, would be the highest place of all."""
    bend = Bend((Tail(0, 1, 1.0, 1.0),), (Ratio(0, 1, 0.0),))

    def log_density(g):
        y = bend.divided(g)
        return -np.logaddexp(0.0, y[:, 0] - 1.0) - 0.5 * y[:, 0] ** 2 * (y[:, 0] < 0.0) - 0.5 * g[:, 1] ** 2

    emulated = Emulated(log_density, 200)
    emulated.evaluate(bend.inverse(1.5 * rng.standard_normal((60, 2))))
    emulated.standardise(Whitening.by(bend, np.zeros(2), np.eye(2)), bend)
    assert emulated.predicted().whitening.in_tails(np.array([[3.0, 2.0]])).item() == pytest.approx(3.0 * np.exp(-2.0))
    far = np.column_stack([[-1e3, 1e3], [4.0, 4.0]])
    assert (emulated.predict(far)[0] < emulated.top).all()


def test_where_nothing_can_be_fitted_there_is_no_posterior():
    marginal = SimpleNamespace(
        n_dim=1, known=[], begin_round=lambda whitening: None, drawn=lambda g, *others: [None] * len(g)
    )

    def flat(g):
        return np.zeros(len(g))

    guess = SimpleNamespace(
        whitening=Whitening(lambda g: g, np.zeros(1), np.eye(1)), values=np.zeros(1), mean=lambda of: np.zeros(1),
        log_density=flat, draws=lambda n, uniform: np.zeros((n, 1)), _of=flat,
        wide=lambda bend: SimpleNamespace(draws=lambda n, rng: np.ones((n, 1)), log_density=flat),
    )  # fmt: skip
    rounds = Rounds(marginal, 64, 1)
    rounds.add(guess, Bend(), 0.5)
    with pytest.raises(Hopeless, match="at none of the hyperparameters"):
        rounds.pooled()
