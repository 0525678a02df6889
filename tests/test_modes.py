"""Modes of log p beside the one that a fit comes to: found, fitted, covered by exact posteriors or named."""

import dataclasses
import re

from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import NGVI, fit_ngvi, load
from pymc_ngvi.core.prices import fit_seconds
from pymc_ngvi.core.psis import Weights
from pymc_ngvi.core.status import ConvergenceWarning, Status
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.fitting.modes.climbs import _Slow, _Whitened, modes_from
from pymc_ngvi.fitting.modes.found import OtherMode, not_covered, shares
from pymc_ngvi.fitting.modes.points import points_for
from pymc_ngvi.fitting.modes.search import ModeSearch, _say
from pymc_ngvi.marginal.exact import is_even
from pymc_ngvi.results.diagnosis.cures import Context
from pymc_ngvi.results.diagnosis.findings import _of_weights, of_modes
from pymc_ngvi.results.diagnosis.moment_drift import drift_of
from pymc_ngvi.results.diagnosis.moves import Moved

QUIET = {"progressbar": False, "posterior": "gaussian"}
#: Graphs of two modes apart differ in numbers alone.
pytestmark = pytest.mark.usefixtures("_anew")


def sine():
    """The ELBO has a maximum at an amplitude of about 0, whatever the frequency, 40 nats below the right one."""
    rng = np.random.default_rng(16)
    t = np.sort(rng.uniform(0.0, 10.0, 60))
    y = 3.0 * np.sin(2.9 * t + 0.7) + rng.standard_normal(60)
    with pm.Model() as model:
        amplitude, frequency = pm.HalfNormal("amplitude", 5.0), pm.HalfNormal("frequency", 5.0)
        phase = pm.Normal("phase", 0.0, 2.0)
        mean = amplitude * pm.math.sin(frequency * t + phase)
        pm.Normal("y", mean, pm.HalfNormal("sigma", 3.0), observed=y)
    return model


def two_states():
    """A hidden Markov model of two states, four steps with ten observations each; both begin far below the data."""
    rng = np.random.default_rng(7)
    state = np.array([0, 0, 1, 1])
    y = np.array([20.0, 26.0])[state][:, None] + rng.standard_normal((4, 10))
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        stay = pm.Beta("stay", 5.0, 2.0, shape=2)
        mu = pm.Normal("mu", 0.0, 20.0, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        emit = pm.logp(pm.Normal.dist(mu, pm.HalfNormal("sigma", 2.0)), y[:, :, None]).sum(axis=1)
        stays, leaves = pt.log(stay), pt.log1p(-stay)
        one, two = emit[0, 0] - np.log(2.0), emit[0, 1] - np.log(2.0)
        for t in range(1, len(y)):
            one, two = (
                emit[t, 0] + pt.logaddexp(one + stays[0], two + leaves[1]),
                emit[t, 1] + pt.logaddexp(one + leaves[0], two + stays[1]),
            )
        pm.Potential("y", pt.logaddexp(one, two))
    return model


def regression(family=pm.Normal, **of_family):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(60)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=2)
        if family is pm.Normal:
            mean = beta[0] + beta[1] * x
            pm.Normal("y", mean, pm.HalfNormal("sigma", 2.0), observed=1.0 + x + rng.standard_normal(60))
        else:
            pm.Poisson("y", pt.exp(beta[0] + beta[1] * x), observed=rng.poisson(np.exp(0.5 + 0.3 * x)))
    return model


def two_modes(apart, weight, start=1.0, n_dim=2):
    """Two unit Gaussians, the one of this weight on the right."""
    centre = np.r_[0.5 * apart, np.zeros(n_dim - 1)]
    with pm.Model() as model:
        x = pm.Flat("x", shape=n_dim, initval=start * centre + 0.1)
        parts = [np.log(w) - 0.5 * ((x - s * centre) ** 2).sum() for w, s in ((weight, 1.0), (1.0 - weight, -1.0))]
        pm.Potential("p", pt.logaddexp(*parts))
    return model


@pytest.fixture(scope="module")
def sines():
    return NGVI(model=sine(), posterior="gaussian", estimator="price")


def fitted(solver, seed):
    solver.configure(random_seed=seed)
    return solver.fit(progressbar=False)


# --- fits go to the best mode ---


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_an_amplitude_of_nothing_is_not_the_end(seed, sines, caplog):
    with caplog.at_level("INFO", "pymc.ngvi"):
        approx = fitted(sines, seed)
    assert approx.converged
    assert approx.elbo.value == pytest.approx(-103.13, abs=0.3)
    assert np.exp(approx.mean_flat[1]) == pytest.approx(2.9, abs=0.1)
    assert "nats higher" in approx.record.restarted
    assert approx.record.restarted in caplog.text
    assert len(approx.hist) == approx.record.n_iterations


@pytest.mark.slow
def test_states_that_begin_far_away_find_their_data():
    approx = fit_ngvi(model=two_states(), random_seed=1, **QUIET)
    assert approx.converged
    mu = approx.sample(500, random_seed=1).posterior["mu"].mean(("chain", "draw"))
    np.testing.assert_allclose(mu, [20.0, 26.0], atol=0.8)


def test_evaluations_of_a_search_are_counted_apart_from_those_of_fits(sines, monkeypatch):
    """The record has the evaluations of both fits, and those of what lies between them beside these."""
    one = fitted(sines, 4)
    assert one.record.restarted
    assert one.record.n_searched > 512
    monkeypatch.setattr(ModeSearch, "after", lambda *_, **__: None)
    first = fitted(sines, 4)
    assert not first.record.restarted
    assert first.elbo.value < one.elbo.value - 30.0
    assert one.n_gradients > first.n_gradients + 16
    assert first.record.n_searched == 0


@pytest.mark.slow
def test_the_same_seed_finds_the_same_place(sines):
    one, two = fitted(sines, 4), fitted(sines, 4)
    assert one.record.restarted
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.n_gradients == two.n_gradients


def test_where_there_is_one_mode_the_fit_stays_bit_by_bit(monkeypatch):
    solver = NGVI(model=regression(), posterior="gaussian")
    one = fitted(solver, 2)
    monkeypatch.setattr(ModeSearch, "after", lambda *_, **__: None)
    two = fitted(solver, 2)
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.elbo == two.elbo
    assert one.record.modes == ()
    assert one.record.searched
    assert not two.record.searched
    assert one.n_gradients == two.n_gradients
    assert one.record.n_searched > 0 == two.record.n_searched


def test_where_one_mode_is_known_nothing_is_evaluated(monkeypatch):
    solver = NGVI(model=regression(pm.Poisson), posterior="gaussian")
    one = fitted(solver, 2)
    monkeypatch.setattr(ModeSearch, "after", lambda *_, **__: None)
    assert one.n_gradients == fitted(solver, 2).n_gradients


def latent():
    """A Gaussian process with an unknown kernel: its nested posterior has no Gaussian fit before it."""
    x = np.linspace(0.0, 1.0, 12)[:, None]
    with pm.Model() as model:
        kernel = pm.HalfNormal("size", 1.0) ** 2 * pm.gp.cov.Matern52(1, pm.InverseGamma("length", 5.0, 2.0))
        f = pm.gp.Latent(cov_func=kernel).prior("f", x)
        pm.Poisson("y", pt.exp(f), observed=np.arange(12) % 4)
    return model


def groups():
    group = np.repeat(np.arange(6), 5)
    with pm.Model() as model:
        u = pm.Normal("u", pm.Normal("mu"), pm.HalfNormal("sd", 1.0), shape=6)
        pm.Poisson("y", pt.exp(u[group]), observed=np.random.default_rng(1).poisson(2.0, 30))
    return model


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (latent, {}),
        (groups, {"reparam": "rvb1", "posterior": "gaussian"}),
        (regression, {"family": "student_t"}),
        (regression, {"step": "constant", "posterior": "gaussian"}),
    ],
)
@pytest.mark.filterwarnings("ignore::pymc_ngvi.ConvergenceWarning")
def test_what_is_not_searched_is_not_called_so(model, options):
    approx = fit_ngvi(50, model=model(), random_seed=1, progressbar=False, **options)
    assert not approx.record.searched
    assert "Other modes" in (report := str(approx.diagnose()))
    assert "not looked for" in report
    assert "A search found" not in report


def test_a_start_at_the_poorer_mode_is_not_the_end():
    approx = fit_ngvi(model=two_modes(8.0, 0.9, -1.0), random_seed=1, **QUIET)
    np.testing.assert_allclose(approx.mean_flat, [4.0, 0.0], atol=0.05)
    assert approx.record.restarted
    [other] = approx.record.modes
    assert other.share == pytest.approx(0.1, abs=0.01)
    np.testing.assert_allclose(other.q.mean(), [-4.0, 0.0], atol=0.05)


def test_a_density_that_costs_nothing_to_evaluate_ends_as_ever():
    """log p of a flat prior alone is a constant."""
    with pm.Model() as model:
        pm.Flat("x")
    with pytest.warns(ConvergenceWarning, match="posterior is improper"):
        approx = fit_ngvi(model=model, random_seed=1, **QUIET)
    assert approx.status is Status.UNBOUNDED


# --- verdicts ---


@pytest.mark.parametrize(("apart", "weight"), [(6.0, 0.6), (10.0, 0.95)])
def test_a_gaussian_at_one_of_two_modes_says_where_the_other_is(apart, weight):
    approx = fit_ngvi(model=two_modes(apart, weight), random_seed=1, **QUIET)
    diagnosis = approx.diagnose()
    assert not diagnosis.reliable
    reason = next(reason for reason in diagnosis.reasons if "another mode" in reason)
    assert f"with {100 * (1 - weight):.0f} % of the mass" in reason
    there = float(re.search(r"`x\[0\]` = (\S+) ", reason).group(1))
    assert there == pytest.approx(-0.5 * apart, abs=0.1)


@pytest.mark.parametrize(("apart", "weight", "start"), [(6.0, 0.7, 1.0), (10.0, 0.95, -1.0)])
def test_an_exact_posterior_covers_both(apart, weight, start):
    approx = fit_ngvi(model=two_modes(apart, weight, start), random_seed=1, progressbar=False)
    assert approx.is_exact
    assert "of the 2 modes that were found" in approx.record.posterior
    assert approx.record.modes == ()
    assert approx.diagnose().reliable
    x = approx.sample(4_000, random_seed=1).posterior["x"].values[0, :, 0]
    sd = np.sqrt(1.0 + weight * (1.0 - weight) * apart**2)
    # Effective sizes are about 2,000: three standard errors, and the same of sds.
    assert x.mean() == pytest.approx((weight - 0.5) * apart, abs=3.0 * sd / np.sqrt(2_000))
    assert x.std() == pytest.approx(sd, rel=0.08)


def test_modes_that_are_equal_by_symmetry_are_told_of_once():
    with pm.Model() as model:
        u = pm.Normal("u", 0.0, 3.0)
        pm.Normal("y", u**2, 0.5, observed=np.array([3.7, 4.1, 4.3]))
    approx = fit_ngvi(model=model, random_seed=1, **QUIET)
    assert [mode.is_equal for mode in approx.record.modes] == [True]
    assert approx.record.modes[0].share == pytest.approx(0.5, abs=1e-6)
    [reason] = approx.diagnose().reasons
    assert "changes sign" in reason


def test_modes_are_kept_in_files(tmp_path):
    model = two_modes(6.0, 0.7)
    approx = fit_ngvi(model=model, random_seed=1, **QUIET)
    approx.save(tmp_path / "fit.nc")
    loaded = load(tmp_path / "fit.nc", model)
    assert loaded.record.modes[0].share == approx.record.modes[0].share
    np.testing.assert_array_equal(loaded.record.modes[0].q.mean(), approx.record.modes[0].q.mean())


def of_search(record):
    return record.searched, record.n_searched, record.restarted, [mode.share for mode in record.modes]


@pytest.mark.parametrize("posterior", ["gaussian", "auto"])
def test_what_a_search_has_found_is_kept_where_a_loaded_fit_goes_on(posterior, tmp_path):
    model = two_modes(8.0, 0.9, -1.0)
    approx = fit_ngvi(model=model, random_seed=1, progressbar=False, posterior=posterior)
    approx.save(tmp_path / "fit.nc")
    loaded = load(tmp_path / "fit.nc", model)
    expected = of_search(approx.gaussian.record)
    assert expected[0]
    assert expected[2]
    assert len(expected[3]) == 1
    for one in (approx, loaded):
        assert of_search(one.gaussian.record) == expected
        one.refine(5, progressbar=False, tol=1e-3)
        assert of_search(one.gaussian.record) == expected
        assert one.is_exact == (posterior == "auto")
        assert len(one.record.modes) == (posterior == "gaussian")


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_fit_that_has_not_ended_yet_is_searched_when_it_has(is_saved, tmp_path):
    model = two_modes(8.0, 0.9, -1.0)
    approx = fit_ngvi(2, model=model, random_seed=1, **QUIET)
    assert not approx.record.searched
    if is_saved:
        approx.save(tmp_path / "fit.nc")
        approx = load(tmp_path / "fit.nc", model)
    approx.refine(progressbar=False)
    assert approx.record.searched
    np.testing.assert_allclose(approx.mean_flat, [4.0, 0.0], atol=0.05)


@pytest.mark.parametrize(("seconds", "said"), [(0.5, ""), (5.0, "5 s."), (40.0, "40 s.")])
def test_a_search_that_takes_long_is_said_beforehand(seconds, said, caplog):
    shown = []
    with caplog.at_level("INFO", "pymc.ngvi"):
        _say(seconds, 1.0 if seconds < 20.0 else 100.0, shown.append)
    assert len(shown) == 1
    assert len(caplog.records) == bool(said)
    assert caplog.text.count("longer than the fit took") == (said == "5 s.")
    assert all(record.message.startswith(shown[0]) for record in caplog.records)


def test_max_seconds_limits_a_search(monkeypatch):
    density = LogDensity(two_modes(8.0, 0.7))
    q = FullState(np.array([4.0, 0.0]), np.eye(2))
    monkeypatch.setattr(LogDensity, "gradient_seconds", 1e-3)
    of_two_fits = 2.0 * fit_seconds(density, 100, 50, "price")
    for most, is_searched in ((None, True), (of_two_fits, False)):
        search = ModeSearch(density, 1, "price", "hessians", most)
        assert (search.after(q, 0.0, 100, 50, is_sound=True) is not None) == is_searched
        assert (density.n_gradients, density.n_hessians) == (0, 0)


def context(n_dim=1):
    with pm.Model() as model:
        pm.Normal("x", shape=n_dim)
    density = LogDensity(model)
    return Context(density.layout, None, "full", has_groups=False, has_hessian=True)


def moved(apart):
    """Draws that have gone some way: 1 is as far as independent ones are."""
    rng = np.random.default_rng(1)
    start, other = rng.standard_normal((2, 400, 1))
    end = np.sqrt(1.0 - apart**2) * start + apart * other if apart < 1.0 else other
    return Moved(start, end, start, np.zeros(400), np.zeros(400), 0.9, 4, 0.5, 0, 4_000)


@pytest.mark.parametrize(("khat", "apart", "serious"), [(0.9, 0.2, True), (0.9, 1.0, False), (0.65, 0.2, False)])
def test_a_heavy_tail_of_weights_is_a_reason_unless_draws_moved_far(khat, apart, serious):
    weights = Weights(khat, 1_000.0, 10_000, 0, 5.0, 100.0)
    assert [f.serious for f in _of_weights(context(), weights, moved(apart))] == ([serious] if khat > 0.7 else [])


@pytest.mark.parametrize("has_missed", [True, False])
def test_a_spread_that_draws_of_q_lack_as_well_is_no_drift(has_missed):
    """As where most of the variance is that of a far mode with so little mass that none of the draws is there."""
    rng = np.random.default_rng(3)
    start, end = 0.8 * rng.standard_normal((2, 768, 1))
    start = start if has_missed else start / 0.8
    drift = drift_of(Moved(start, end, start, np.zeros(768), np.zeros(768), 0.9, 4, 0.5, 0, 4_000), 0.0, 1.0)
    assert drift.sd.value[0] == pytest.approx(-0.2, abs=0.06)  # an error of .025
    assert len(drift.sd.beyond(0.1)) == (not has_missed)


@pytest.mark.parametrize(("share", "at", "told"), [(0.3, 6.0, 1), (0.001, 3.0, 0), (0.001, 30.0, 1)])
def test_a_mode_counts_by_its_mass_or_by_the_variance_that_it_adds(share, at, told):
    mode = OtherMode(FullState(np.array([at]), np.eye(1)), share)
    found = of_modes(context(), np.zeros(1), np.ones(1), [mode], has_symmetries=False)
    assert len(found) == told
    assert all(f"`x[0]` = {at:g}" in f.text for f in found)


def test_an_image_is_left_to_the_symmetry_that_makes_it():
    mode = OtherMode(FullState(np.array([6.0]), np.eye(1)), 0.5, is_equal=True)
    assert of_modes(context(), np.zeros(1), np.ones(1), [mode], has_symmetries=True) == []
    assert len(of_modes(context(), np.zeros(1), np.ones(1), [mode], has_symmetries=False)) == 1


@pytest.mark.parametrize(("apart", "even"), [(0.0, True), (6.0, False), (10.0, False)])
def test_weights_are_nearly_equal_only_where_wider_draws_find_no_more(apart, even):
    density = LogDensity(two_modes(apart, 0.6))
    assert is_even(density, FullState(np.array([0.5 * apart, 0.0]), np.eye(2))) is even


# --- the search and its parts ---


class Walled:
    """Two Gaussians on a half line; most draws of N(0, 1) climb to the one about 0, which has little mass."""

    n_dim = 1

    def logp_grad(self, theta):
        x = theta[:, 0]
        heights = np.stack([-0.5 * (x / 0.5) ** 2, 30.0 - 0.5 * ((x - 2.0) / 0.1) ** 2])
        total = np.logaddexp(*heights)
        slopes = np.stack([-x / 0.25, -(x - 2.0) / 0.01])
        grad = np.sum(np.exp(heights - total) * slopes, axis=0)
        outside = x > 2.05
        return np.where(outside, -np.inf, total), np.where(outside, np.nan, grad)[:, None]


def climb(density, points, scale=1.0):
    q = FullState(np.zeros(density.n_dim), np.eye(density.n_dim))
    return modes_from(density, q, points, np.full(points.shape, scale))


def test_modes_have_the_mass_of_gaussians_about_them(rng):
    modes, which = climb(Walled(), rng.standard_normal((256, 1)))
    largest = max(modes, key=lambda mode: mode.log_mass)
    assert largest.point == pytest.approx(2.0, abs=1e-4)
    assert largest.log_mass == pytest.approx(30.0 + np.log(0.1 * np.sqrt(2.0 * np.pi)), abs=1e-3)
    assert (which == modes.index(largest)).sum() < 0.2 * len(which)


def test_a_density_that_is_nowhere_finite_has_no_mode():
    modes, which = climb(Walled(), np.linspace(3.0, 4.0, 100)[:, None])
    assert modes == []
    assert (which == -1).all()


@pytest.mark.parametrize("n_dim", [2, 20])
def test_both_ways_to_climb_find_both_modes(n_dim, rng):
    """Newton's method in few dimensions, steps without curvatures in many."""
    density = LogDensity(two_modes(8.0, 0.7, n_dim=n_dim))
    modes, _ = climb(density, 3.0 * rng.standard_normal((30, n_dim)), 3.0)
    modes = sorted(modes, key=lambda mode: -mode.log_mass)
    np.testing.assert_allclose([mode.point[0] for mode in modes], [4.0, -4.0], atol=0.05)
    np.testing.assert_allclose(
        [mode.log_mass for mode in modes], np.log([0.7, 0.3]) + 0.5 * n_dim * np.log(2.0 * np.pi), atol=0.05
    )


def test_curvatures_by_rows_are_those_of_log_p(rng):
    """Nothing is compiled for them; families of every form take them."""
    density = LogDensity(regression())
    q = FullState(np.array([1.0, 1.0, 0.0]), 0.1 * np.eye(3))
    for point in q.mean() + rng.standard_normal((3, 3)):
        whitened = density.by_rows.about(point, q).whitened(q)
        np.testing.assert_allclose(whitened, density.mean_hessian(point[None]).whitened(q), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n_dim", "by_mass"), [(2, False), (20, False), (20, True)])
def test_climbs_that_come_home_end_there(n_dim, by_mass, rng, monkeypatch):
    """In many dimensions, a search about the only mode takes few steps and finds none; another mode is found yet.

    Also a higher one, of climbs that are judged by the mass about them.
    """
    monkeypatch.setattr(_Whitened, "takes_longer", lambda self, n_gradients: by_mass)
    points = np.concatenate([np.zeros((1, n_dim)), 3.0 * rng.standard_normal((40, n_dim))])
    points[:, 0] = 2.0 * points[:, 0] + 4.0
    q = FullState(points[0].copy(), np.eye(n_dim))
    for weight, n_others in ((1.0 - 1e-12, 0), (0.7, 1), (0.2, 1)):
        density = LogDensity(two_modes(8.0, weight, n_dim=n_dim))
        home_mass = np.log(weight) + 0.5 * n_dim * np.log(2.0 * np.pi)
        modes, _ = modes_from(density, q, points, np.ones_like(points), home_mass=home_mass)
        far = [mode for mode in modes if mode.point[0] < 0.0 and mode.log_mass > home_mass - 10.0]
        assert len(far) == n_others


@pytest.mark.parametrize("seed", [1, 2])
def test_climbs_down_a_funnel_are_left(seed, monkeypatch):
    """Towards a scale of 0, log p of its effects rises for ever, and the mass about a point does not."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(150), 4)
    with pm.Model() as model:
        effect = pm.Normal("effect", 0.0, pm.HalfNormal("scale", 1.0), shape=150)
        pm.Poisson("y", pt.exp(effect[group]), observed=rng.poisson(np.exp(rng.normal(0.0, 0.7, 150)[group])))
    taken = []
    for by_mass in (False, True):
        monkeypatch.setattr(_Whitened, "takes_longer", lambda self, n_gradients, is_so=by_mass: is_so)
        approx = fit_ngvi(model=model, random_seed=seed, **QUIET)
        assert not approx.record.modes
        taken.append(approx.record.n_searched)
    assert taken[1] < 0.5 * taken[0]


@pytest.mark.parametrize(
    ("sds", "logp", "is_lost"),
    [
        ((1.0, 1.0), (-100.0, -60.0), False),  # log p and the mass about a point rise together
        ((1.0, np.exp(-40.0)), (-100.0, -60.0), True),  # log p alone does, and the mass is small
        ((1.0, np.exp(-20.0)), (-1.0, 19.0), False),  # as much mass as the fit has
        ((1.0, 1.0), (-100.0, -99.0), True),  # it rises far too slowly
    ],
)
def test_climbs_are_judged_by_the_mass_about_them(sds, logp, is_lost):
    points = iter([np.zeros(1), np.zeros(1), np.ones(1)])
    scales = iter([1.0, *sds])
    whitened = SimpleNamespace(points=lambda z: [next(points) for _ in z])
    slow = _Slow(whitened, lambda point: FullState(point, np.array([[next(scales)]])), 0.0)
    was, now = (np.zeros((1, 1)), np.array(logp[:1])), (np.ones((1, 1)), np.array(logp[1:]))
    assert slow.lead_down_funnels(was, now, 6, (np.zeros((1, 1))[0], 0.0)).item() == is_lost


def test_a_saddle_is_no_mode(rng):
    class Saddle:
        n_dim = 2

        def logp_grad(self, theta):
            sign = np.array([-1.0, 1.0])
            return 0.5 * (sign * theta**2).sum(axis=1), sign * theta

    modes, _ = climb(Saddle(), rng.standard_normal((20, 2)))
    assert modes == []


def test_points_are_of_the_prior_of_the_fit_and_far_around_it(rng):
    model = regression()
    density = LogDensity(model)
    q = FullState(np.array([1.0, 1.0, 0.0]), 0.1 * np.eye(3))
    points = points_for(density, q, rng, 48, 600, is_sound=True)
    assert points.n_own == 3
    assert points.n_prior == 300
    np.testing.assert_array_equal(points.theta[0], q.mean())
    distance = np.linalg.norm(points.theta[points.n_own :] - q.mean(), axis=1) / 0.1
    assert (distance > 10.0).sum() > 20
    assert points_for(density, q, rng, 48, 600, is_sound=False).n_own == 0


def test_masses_are_compared_by_importance():
    density = LogDensity(two_modes(8.0, 0.7))
    states = [FullState(np.array([at, 0.3]), 1.3 * np.eye(2)) for at in (4.0, -4.0)]  # neither is right
    np.testing.assert_allclose(shares(density, states, 1), [0.7, 0.3], atol=0.03)


def test_a_mode_is_covered_where_draws_have_their_share_there(rng):
    q, other = (FullState(np.array([at]), np.eye(1)) for at in (0.0, 8.0))
    mode = OtherMode(other, 0.3)
    draws = rng.standard_normal((2_000, 1)) + 8.0 * (rng.random((2_000, 1)) < 0.3)
    assert not_covered([mode], q, draws) == ()
    assert not_covered([mode], q, draws[draws[:, 0] < 4.0]) == (mode,)
    assert not_covered([dataclasses.replace(mode, share=1e-4)], q, draws[draws[:, 0] < 4.0]) == ()
