"""Effects that one row alone reads, integrated out of log p and drawn afterwards."""

import numpy as np
import pymc as pm
import pytest

from scipy import integrate, optimize, special

from pymc_ngvi import LogDensity
from pymc_ngvi.density.rows_given import latent_rows
from pymc_ngvi.rows.integrated import Integrated

SCALES = (0.0, 0.01, 0.3, 1.0, 5.0)
PREDICTORS = np.array([-8.0, -2.0, 0.0, 1.0, 4.0, 9.0])


def poisson(eta, y):
    return [y * eta - np.exp(eta) - special.gammaln(y + 1.0)]


def bernoulli(eta, y):
    return [y * eta - np.logaddexp(0.0, eta)]


def binomial(eta, y, n):
    return [y * eta - n * np.logaddexp(0.0, eta)]


def negative_binomial(eta, y, alpha):
    return [y * eta - (y + alpha) * np.logaddexp(np.log(alpha), eta)]


CASES = [
    (poisson, (0.0,)), (poisson, (1.0,)), (poisson, (40.0,)), (poisson, (1e4,)),
    (bernoulli, (0.0,)), (bernoulli, (1.0,)),
    (binomial, (0.0, 8.0)), (binomial, (3.0, 8.0)), (binomial, (9_990.0, 1e4)),
    (negative_binomial, (0.0, 0.3)), (negative_binomial, (7.0, 50.0)), (negative_binomial, (1e4, 2.0)),
]  # fmt: skip


def by_quadrature(function, eta, scale, data):
    """Return log E[exp f], and mean and variance of z, by SciPy."""

    def height(z):
        with np.errstate(all="ignore"):
            return float(function(eta + scale * z, *data)[0] - 0.5 * z * z)

    grid = np.linspace(-150.0, 150.0, 30_001)
    heights = np.array([height(z) for z in grid[::50]])
    near = grid[::50][np.nanargmax(np.where(np.isfinite(heights), heights, -np.inf))]
    found = optimize.minimize_scalar(lambda z: -height(z), bounds=(near - 0.6, near + 0.6), method="bounded")
    mode, top = found.x, -found.fun
    ends = []
    for sign in (-1.0, 1.0):
        far = 1e-3
        while height(mode + sign * far) > top - 45.0:
            far *= 1.3
        ends.append(mode + sign * far)

    def moment(power):
        parts = ((ends[0], mode), (mode, ends[1]))
        options = {"epsabs": 0, "epsrel": 1e-11, "limit": 200}
        return sum(integrate.quad(lambda z: z**power * np.exp(height(z) - top), a, b, **options)[0] for a, b in parts)

    total, first, second = (moment(power) for power in (0, 1, 2))
    mean = first / total
    return top + np.log(total / np.sqrt(2.0 * np.pi)), mean, second / total - mean**2


@pytest.mark.parametrize(("function", "data"), CASES)
def test_an_integrated_row_is_what_quadrature_by_scipy_gives(function, data):
    rows = Integrated(function, 1)
    own = [np.array([[x]]) for x in data]
    for scale in SCALES:
        inputs = [PREDICTORS[:, None], *own, np.array([[scale]])]
        found = rows(*inputs)[0][:, 0]
        for k, eta in enumerate(PREDICTORS[1::2]):
            value, _, _ = by_quadrature(function, eta, scale, data)
            assert abs(found[1 + 2 * k] - value) < 2e-8 * (1.0 + 1e-4 * abs(value))


def test_far_from_its_mode_a_row_is_minus_infinity_or_right():
    """With a predictor of 700 the rate overflows; a scale brings it back at a price that is known."""
    rows = Integrated(poisson, 1)
    found = rows(np.array([[60.0, 2_000.0]]), np.array([[3.0, 3.0]]), np.array([[0.5, 0.5]]))[0][0]
    value, _, _ = by_quadrature(poisson, 60.0, 0.5, (3.0,))
    np.testing.assert_allclose(found[0], value, rtol=1e-9)
    assert not found[1] > -1e6


@pytest.mark.parametrize(("scale", "width"), [(0.05, 2.0), (0.7, 2.0), (-2.0, 2.0), (0.3, 36.0)])
def test_draws_of_many_rows_have_the_distribution_of_the_effect_given_its_row(scale, width):
    """Uniform values of distribution functions, at equal predictors and at predictors with others in between."""
    n, y, eta, a = 20_000, np.array([[0.0, 0.0, 12.0]]), np.array([0.5, -1.5, 2.0]), scale * np.array([1.0, 1.13, 1.0])
    at = np.arange(4 * n) % 4 > 0
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        predictors = np.tile(eta, (4 * n, 1))
        predictors[at] += rng.uniform(-width, 1.7 * width, (3 * n, 1))
        z = Integrated(poisson, 1).drawn(rng, predictors, y, a[None])[~at]
        for k in range(3):
            grid = np.linspace(-10.0, 10.0, 20_001)
            density = np.exp(poisson(eta[k] + a[k] * grid, y[0, k])[0] - 0.5 * grid**2)
            reached = (np.cumsum(density) - 0.5 * density) / density.sum()
            apart = np.abs(np.interp(np.sort(z[:, k]), grid, reached) - (np.arange(n) + 0.5) / n).max()
            assert apart < 0.0135


@pytest.mark.parametrize("seed", [1, 2])
def test_draws_with_a_predictor_far_out_are_right(seed):
    """It comes of hyperparameters far out."""
    eta, a, n = np.append(np.tile([0.5, -1.5], 1_000), -60.0), np.append(np.full(2_000, 0.7), 25.0), 16
    y, rng = np.zeros((1, len(eta))), np.random.default_rng(seed)
    z = Integrated(poisson, 1).drawn(rng, np.tile(eta, (n, 1)), y, a[None])
    for of, of_eta, of_a in ((z[:, :-1:2], 0.5, 0.7), (z[:, -1:], -60.0, 25.0)):
        grid = np.linspace(-10.0, 10.0, 20_001)
        density = np.exp(poisson(of_eta + of_a * grid, 0.0)[0] - 0.5 * grid**2)
        mean = density @ grid / density.sum()
        sd = np.sqrt(density @ (grid - mean) ** 2 / density.sum())
        assert abs(of.mean() - mean) < 4.0 * sd / np.sqrt(of.size)


# --- in models ---


def model_of(form, n=24, likelihood="poisson"):
    """Groups of four rows, and an effect of each row."""
    rng, group = np.random.default_rng(3), np.arange(n) % 4
    y = rng.poisson(np.exp(0.5 + rng.normal(0.0, 0.7, n)))
    with pm.Model() as model:
        mu, size = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("size", 1.0)
        u, s = pm.Normal("u", 0.0, size, shape=4), pm.HalfNormal("s", 1.0)
        if form == "centred":
            eta = pm.Normal("e", mu + u[group], s, shape=n)
        elif form == "about 0":
            eta = mu + u[group] + pm.Normal("e", 0.0, s, shape=n)
        else:
            eta = mu + u[group] + s * pm.Normal("e", 0.0, 1.0, shape=n)
        if likelihood == "poisson":
            pm.Poisson("y", pm.math.exp(eta), observed=y)
        elif likelihood == "binomial":
            pm.Binomial("y", 12, logit_p=eta, observed=np.minimum(y, 12))
        elif likelihood == "negative binomial":
            pm.NegativeBinomial("y", pm.math.exp(eta), pm.Exponential("alpha", 1.0), observed=y)
        elif likelihood == "student":
            pm.StudentT("y", nu=4.0, mu=eta, sigma=0.3, observed=y)
        else:
            pm.Normal("y", eta, 0.3, observed=y)
    return model


def left_of(model, values=None, n=2):
    """Return rows with effects integrated out, at ``n`` equal values of what is given, which come with them."""
    density = LogDensity(model)
    given = latent_rows(density)
    assert given.own is not None
    start = density.initial_point()[given.outside]
    values = np.tile(start - 0.2 if values is None else np.full(len(start), values), (n, 1))
    rows, agrees = given.at(values)
    assert agrees.all()
    return density, given, rows, values


def log_p(density, given, values, inside):
    """Return log p of the model, (n,), at points (n, n_inside)."""
    theta = np.empty((len(inside), density.n_dim))
    theta[:, given.outside], theta[:, given.inside] = values, inside
    return density.logp(theta)


@pytest.mark.parametrize(
    ("form", "likelihood"),
    [(f, "poisson") for f in ("centred", "about 0", "not")] + [("not", "binomial"), ("not", "negative binomial")],
)
def test_log_p_is_integrated_over_each_effect(form, likelihood):
    """Of all that adds up, each effect is integrated by itself, by values of log p alone."""
    density, given, rows, values = left_of(model_of(form, likelihood=likelihood))
    assert (given.n_dim, len(given.inside)) == (5, 29)
    x = (given.start + 0.3 * np.random.default_rng(1).standard_normal((2, 5)))[:, :, None]
    about = rows.drawn_inside(x, np.random.default_rng(2))[:, :, 0]
    z, spread = np.linspace(-9.0, 9.0, 1_801), 0.8  # a grid in units of prior sds, whatever the form
    total = log_p(density, given, values, about)
    first = total.copy()
    for k in given.own.coordinates:
        for i in range(2):
            points = np.repeat(about[i : i + 1], len(z), axis=0)
            points[:, k] += spread * z
            heights = log_p(density, given, values[0], points) - first[i]
            total[i] += np.log(np.exp(heights).sum() * spread * (z[1] - z[0]))
    np.testing.assert_allclose(rows.values(x)[:, 0], total, rtol=1e-8)


@pytest.mark.parametrize("form", ["about 0", "not"])
def test_a_scale_of_nearly_0_is_harmless(form):
    """Effects are 0 then, and rows what they are without."""
    density, given, rows, values = left_of(model_of(form), -25.0)
    x = np.tile([0.4, 0.3, -0.2, 0.1, 0.5], (2, 1))
    x[1] += 0.3
    assert np.isfinite(rows.drawn_inside(x[:, :, None], np.random.default_rng(1))).all()
    at_0 = np.zeros((2, len(given.inside)))
    at_0[:, given.kept] = x
    apart = np.diff(log_p(density, given, values, at_0))
    np.testing.assert_allclose(np.diff(rows.values(x[:, :, None])[:, 0]), apart, rtol=1e-7)


@pytest.mark.parametrize(
    ("likelihood", "why"), [("student", "is not concave in its own effect"), ("normal", "no effect is read by one row")]
)
def test_what_is_not_integrated_out(likelihood, why):
    given = latent_rows(LogDensity(model_of("not", likelihood=likelihood)))
    assert given.own is None
    assert why in given.integrate_own()


def test_effects_of_groups_and_of_series_stay():
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        u = pm.Normal("u", 0.0, s, shape=3)
        x = pm.GaussianRandomWalk("x", sigma=s, init_dist=pm.Normal.dist(0.0, 1.0), shape=9)
        pm.Poisson("y", pm.math.exp(u[np.arange(9) % 3] + x), observed=np.arange(9))
    assert latent_rows(LogDensity(model)).own is None


def of_probabilities(size, y=(0, 1, 0, 1, 0, 1)):
    with pm.Model() as model:
        b, s = pm.Normal("b", 0.0, 1.0), pm.HalfNormal("s", 1.0)
        e = pm.Normal("e", 0.0, 1.0, shape=6)
        pm.Bernoulli("y", p=0.5 + size * (b + s * e), observed=np.array(y))
    return LogDensity(model)


def test_a_condition_on_effects_keeps_them():
    """A probability that is affine in an effect may be above 1: part of the integral would be outside its support."""
    assert latent_rows(of_probabilities(0.05)).own is not None
    given = latent_rows(of_probabilities(0.3))
    assert given.own is None
    assert given.integrate_own() == "log p is not finite wherever the effects are"


def test_log_p_ends_where_its_conditions_do():
    """Failures alone say nothing of a probability below 0, which the means of the effects have."""
    given = latent_rows(of_probabilities(0.05, np.zeros(6, dtype=int)))
    values, b = np.zeros((1, 1)), np.array([[[0.0, -1.0, -15.0]]])
    rows, _ = given.at(values)
    assert np.isfinite(rows.values(b)).all()
    np.testing.assert_array_equal(np.isfinite(given.logp(rows, values, b)), [[True, True, False]])


def test_a_nested_posterior_is_that_of_a_grid():
    """Two parameters, 25 effects: log m by quadrature, row by row, on a grid of the two."""
    rng = np.random.default_rng(4)
    y = rng.poisson(np.exp(0.6 + 0.8 * rng.standard_normal(25)))
    with pm.Model():
        b, s = pm.Normal("b", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        e = pm.Normal("e", 0.0, 1.0, shape=25)
        pm.Poisson("y", pm.math.exp(b + s * e), observed=y)
        approx = pm.fit(method="ngvi", posterior="nested", random_seed=1, progressbar=False)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid_b, grid_s = np.meshgrid(np.linspace(-1.0, 2.0, 61), np.linspace(0.01, 2.5, 60), indexing="ij")
    eta = grid_b[..., None] + grid_s[..., None] * nodes
    density, of_z = -(grid_b**2) / 8.0 - 0.5 * grid_s**2, []
    for one in y:
        heights = one * eta - np.exp(eta)
        inner = np.exp(heights - heights.max(axis=-1, keepdims=True)) * weights
        density = density + np.log(inner.sum(axis=-1)) + heights.max(axis=-1)
        of_z.append((inner @ nodes) / inner.sum(axis=-1))
    p = np.exp(density - density.max())
    p /= p.sum()
    draws = approx.sample(4_000, random_seed=1).posterior
    assert approx.checks.n_local == 26
    assert approx.checks.variance < 0.1
    for name, grid in (("b", grid_b), ("s", grid_s)):
        mean = (p * grid).sum()
        sd = np.sqrt((p * (grid - mean) ** 2).sum())
        assert abs(float(draws[name].mean()) - mean) < 0.12 * sd
        assert abs(float(draws[name].std()) / sd - 1.0) < 0.1
    means = np.array([(p * z).sum() for z in of_z])
    assert np.abs(draws["e"].mean(("chain", "draw")).values - means).max() < 0.12
