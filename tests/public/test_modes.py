"""Modes of log p beside the one that a fit comes to: found, fitted, covered by exact posteriors or named."""

import re

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from scipy import stats
from scipy.special import logsumexp

from pymc_ngvi import NGVI, ConvergenceWarning, NotExactError, Status, fit_ngvi, load

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


def two_modes(apart, weight, start=1.0, n_dim=2, sd=1.0):
    """A unit Gaussian of this weight on the right, and one with this standard deviation on the left."""
    centre = np.r_[0.5 * apart, np.zeros(n_dim - 1)]
    with pm.Model() as model:
        x = pm.Flat("x", shape=n_dim, initval=start * centre + 0.1)
        right = np.log(weight) - 0.5 * ((x - centre) ** 2).sum()
        left = np.log((1.0 - weight) / sd**n_dim) - 0.5 * (((x + centre) / sd) ** 2).sum()
        pm.Potential("p", pt.logaddexp(right, left))
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
    with caplog.at_level("DEBUG", "pymc.ngvi"):
        approx = fitted(sines, seed)
    assert approx.converged
    assert approx.elbo.value == pytest.approx(-103.13, abs=0.3)
    assert np.exp(approx.mean_flat[1]) == pytest.approx(2.9, abs=0.1)
    assert "nats higher" in approx.record.restarted
    assert approx.record.restarted in caplog.text
    assert len(approx.hist) == approx.record.n_iterations


def test_where_there_is_one_mode_none_is_named():
    approx = fitted(NGVI(model=regression(), posterior="gaussian"), 2)
    assert approx.record.modes == ()
    assert approx.record.searched
    assert not approx.record.restarted
    assert approx.record.n_searched > 0


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
    approx = fit_ngvi(model=two_modes(8.0, 0.9, -1.0, sd=0.5), random_seed=1, **QUIET)
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
    assert "2 modes found" in approx.record.posterior
    assert approx.record.modes == ()
    assert approx.diagnose().reliable
    x = approx.sample(4_000, chains=1, random_seed=1).posterior["x"].values[0, :, 0]
    sd = np.sqrt(1.0 + weight * (1.0 - weight) * apart**2)
    # Effective sizes are about 2,000: three standard errors, and the same of sds.
    assert x.mean() == pytest.approx((weight - 0.5) * apart, abs=3.0 * sd / np.sqrt(2_000))
    assert x.std() == pytest.approx(sd, rel=0.08)


@pytest.mark.parametrize("is_centred", [True, False])
def test_a_walk_is_at_both(is_centred):
    """Of a walk that two sensors disagree on; a filter on a grid has it above 0 with a probability of 0.673."""
    rng = np.random.default_rng(4)
    y = np.stack([side + 0.15 * rng.standard_normal(24) for side in (-2.0, 2.0)])
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        if is_centred:
            f = pm.GaussianRandomWalk("f", sigma=s, init_dist=pm.Normal.dist(0.0, 3.0), steps=23)
        else:
            f0, z = pm.Normal("f0", 0.0, 3.0), pm.Normal("z", shape=24)
            f = pm.Deterministic("f", f0 + s * pt.cumsum(z))
        pm.StudentT("y", nu=3.0, mu=f, sigma=0.3, observed=y)
    approx = fit_ngvi(model=model, random_seed=1, progressbar=False)
    assert approx.is_nested  # centred, half of the walk would be globals, and too many of them
    assert approx.diagnose(random_seed=1).reliable
    above = (approx.sample(4_000, random_seed=1).posterior["f"] > 0.0).mean(("chain", "draw")).values
    error = np.sqrt(0.673 * 0.327 / approx.checks.effective_size)
    assert np.abs(above - 0.673).max() < 4.0 * error


def two_sided_groups(*, has_slopes):
    """Two sensors disagree on each of six groups; also on a grid: the mean of log tau, and probabilities of a > 0."""
    x, sides = np.repeat([-1.0, 0.0, 1.0], 4), np.tile([-2.0, 2.0], 6)
    y = sides + 0.5 * x + 0.2 * np.random.default_rng(5).standard_normal((6, 12))
    with pm.Model() as model:
        a = pm.Normal("a", 1.0, pm.HalfNormal("tau", 2.0), shape=6)
        slope = pm.Normal("b", shape=6)[:, None] if has_slopes else 0.5
        pm.StudentT("y", nu=3.0, mu=a[:, None] + slope * x, sigma=0.3, observed=y)
    grid, log_tau = np.linspace(-6.0, 6.0, 601), np.linspace(-4.0, 2.2, 63)
    log_p = stats.t.logpdf(y[:, None], 3.0, grid[:, None] + 0.5 * x, 0.3).sum(axis=2)[:, None]
    log_p = log_p + stats.norm.logpdf(grid, 1.0, np.exp(log_tau)[:, None])
    of_group, above = logsumexp(log_p, axis=2), logsumexp(log_p[:, :, grid > 0.0], axis=2)
    log_m = of_group.sum(axis=0) + stats.halfnorm.logpdf(np.exp(log_tau), scale=2.0) + log_tau
    weights = np.exp(log_m - logsumexp(log_m))
    return model, weights @ log_tau, np.exp(above - of_group) @ weights


@pytest.mark.parametrize("seed", [1, 2])
def test_groups_of_one_effect_are_at_both(seed):
    model, mean, above = two_sided_groups(has_slopes=False)
    approx = fit_ngvi(model=model, random_seed=seed, progressbar=False)
    assert approx.is_exact
    assert approx.mean_flat[0] == pytest.approx(mean, abs=0.02)
    found = (approx.sample(4_000, random_seed=1).posterior["a"] > 0.0).mean(("chain", "draw")).values
    np.testing.assert_allclose(found, above, atol=4.0 * np.sqrt(0.25 / approx.checks.effective_size))
    assert approx.diagnose(random_seed=1).reliable


@pytest.mark.parametrize("seed", [1, 2])
def test_groups_of_two_effects_at_one_mode_are_not_exact(seed):
    """No grid of few nodes reaches the other mode, and the weights of the globals know nothing of it."""
    model, _, _ = two_sided_groups(has_slopes=True)
    with pytest.raises(NotExactError, match="of its mass at another mode, where there are no quadrature nodes"):
        fit_ngvi(model=model, posterior="exact", random_seed=seed, progressbar=False)


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
