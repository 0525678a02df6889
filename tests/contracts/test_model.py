"""A model on the flat vector: log p, its derivatives and constrained values are PyMC's own, with data of the moment."""

import pickle

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from models import check_loops
from pymc.pytensorf import compile as pymc_compile
from pytensor.compile.mode import Mode
from pytensor.link.c.basic import CLinker
from pytensor.link.numba.linker import NumbaLinker
from scipy import stats

from pymc_ngvi import LogDensity
from pymc_ngvi.density import logdensity, without_c
from pymc_ngvi.density import over_draws as on_draws
from pymc_ngvi.density.constrain import Constrainer


def python_mode():
    # Next to no rewrites: the numbers are those of the graph as PyMC writes it.
    return Mode("py", "fast_compile")


def pymc_logp_dlogp(model):
    """PyMC's own log density and gradient, in the order of ``model.value_vars``."""
    with model, without_c():
        return pymc_compile(model.value_vars, [model.logp(), model.dlogp()], mode=python_mode())


def values_of(model, theta):
    """Split a flat vector by the model's own order and the shapes of its initial point."""
    point, values, start = model.initial_point(), [], 0
    for var in model.value_vars:
        shape = point[var.name].shape
        values.append(theta[start : start + int(np.prod(shape))].reshape(shape))
        start += values[-1].size
    assert start == len(theta)
    return values


def _refuse(*args, **kwargs):
    raise AssertionError("the quick mode should not generate code")


@pytest.fixture(scope="module", params=list(models.FEATURES))
def density(request, once):
    """Compiled, initial point and constants included, where generating code is an error."""
    once.is_active = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLinker, "make_thunk", _refuse)
        patch.setattr(NumbaLinker, "fgraph_convert", _refuse)
        density = LogDensity(models.FEATURES[request.param](), "quick")
        density.logp_grad(density.initial_point()[None])
        density.hessian(density.initial_point()[None])
    once.is_active = True
    return density


def test_nothing_runs_element_by_element(density):
    """Neither in the graph nor in those inside it (Scan, log-sum-exp)."""
    check_loops(density)
    theta = models.random_points(density, 2, 1)
    assert np.isfinite(density.logp_grad(theta)[0]).all()
    assert np.isfinite(density.hessian(theta)).all()


def test_equals_pymc(density):
    reference = pymc_logp_dlogp(density.model)
    theta = models.random_points(density, 3, 5)
    logp, grad = density.logp_grad(theta)
    for i, row in enumerate(theta):
        with without_c():  # inner graphs are compiled when they are first called
            expected_logp, expected_grad = reference(*values_of(density.model, row))
        # Two orders of summation of at most a few hundred terms in double precision.
        assert logp[i] == pytest.approx(float(expected_logp), rel=1e-11, abs=1e-11)
        np.testing.assert_allclose(grad[i], expected_grad, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(density.logp(theta), logp, rtol=1e-13)
    np.testing.assert_array_equal(density.grad(theta), grad)


def test_hessian_is_the_derivative_of_the_gradient(density):
    theta = models.random_points(density, 2, 6)
    hessian = density.hessian(theta)
    step = 1e-5
    for i, point in enumerate(theta):
        shifts = step * np.eye(density.n_dim)
        difference = (density.grad(point + shifts) - density.grad(point - shifts)) / (2 * step)
        # Truncation is step^2 / 6 = 2e-11 of the fourth derivative, and rounding 1e-16 / step = 1e-11 of the gradient:
        # leave those a factor of 1e4.
        np.testing.assert_allclose(hessian[i], difference, rtol=1e-6, atol=1e-7 * max(1.0, np.abs(difference).max()))
    np.testing.assert_array_equal(hessian, hessian.swapaxes(1, 2))


def test_hessian_products_are_the_hessian_times_directions(density, rng):
    theta = models.random_points(density, 3, 7)
    directions = rng.normal(size=(2, density.n_dim))
    expected = np.einsum("nij,kj->nki", density.hessian(theta), directions)
    products = density.hessian_products(theta, directions)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(products, expected, rtol=1e-9, atol=1e-11 * scale)
    mean = density.mean_hessian(theta).products(directions)
    np.testing.assert_allclose(mean, products.mean(axis=0), rtol=1e-12, atol=1e-13 * scale)


def test_jacobian_is_included():
    """By hand: of scale = exp(t) and p = sigmoid(t) the log Jacobians are t and log p (1 - p)."""
    with pm.Model() as model:
        pm.HalfNormal("scale", 1.3)
        pm.Beta("p", 1.0, 1.0)
    density = LogDensity(model, "quick")
    t = 0.7
    theta = np.array([[t, t]])
    logp, grad = density.logp_grad(theta)
    square, p = (np.exp(t) / 1.3) ** 2, 1 / (1 + np.exp(-t))
    constant = 0.5 * np.log(2 / np.pi) - np.log(1.3)
    assert logp[0] == pytest.approx(constant - 0.5 * square + t + np.log(p * (1 - p)), rel=1e-13)
    np.testing.assert_allclose(grad[0], [1 - square, 1 - 2 * p], rtol=1e-13)
    np.testing.assert_allclose(density.hessian(theta)[0], np.diag([-2 * square, -2 * p * (1 - p)]), rtol=1e-12)


# --- names, order, shapes ---------------------------------------------------------------------------------------------


def test_is_frozen_when_it_is_made():
    """Variables that are added later change neither the layout nor the values, though functions are made later."""
    model = models.transformed()
    density, theta = LogDensity(model, "quick"), np.full((1, 13), 0.3)
    with model:
        pm.Normal("a_late_one")
    np.testing.assert_array_equal(density.logp(theta), LogDensity(models.transformed(), "quick").logp(theta))
    assert density.n_dim == len(density.initial_point()) == 13
    density.initial_point()[:] = 9.0  # a copy
    assert (density.initial_point() != 9.0).all()


# --- batches and counters ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logistic():
    return LogDensity(models.bernoulli_logit(), "quick")


@pytest.mark.parametrize("n_draws", [0, 1, 3, 4, 5, 8, 9])
def test_batches_of_four_equal_single_draws(logistic, monkeypatch, n_draws):
    monkeypatch.setattr(logdensity, "_BATCH_ELEMENTS", 4 * logistic.graphs.cost.widest)
    assert logistic.batch_size == 4
    theta = models.random_points(logistic, n_draws, 8, scale=1.0)
    logp, grad = logistic.logp_grad(theta)
    assert logp.shape == logistic.logp(theta).shape == (n_draws,)
    assert grad.shape == (n_draws, 3)
    for i in range(n_draws):
        one_logp, one_grad = logistic.logp_grad(theta[i : i + 1])
        # Matrix products of other sizes add in other orders.
        np.testing.assert_allclose(logp[i], one_logp[0], rtol=1e-13)
        np.testing.assert_allclose(grad[i], one_grad[0], rtol=1e-12, atol=1e-13)


def test_non_finite_values_are_returned():
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("p", pt.log(x))
    density = LogDensity(model, "quick")
    logp, _ = density.logp_grad(np.array([[1.0], [0.0], [-1.0]]))
    np.testing.assert_array_equal(logp, [0.0, -np.inf, np.nan])


# --- precision --------------------------------------------------------------------------------------------------------


def shifted_model():
    """Constants exact in single precision; points that single precision can't tell apart."""
    with pm.Model() as model:
        x = pm.Normal("x", 1024.0, 2.0, shape=2)
        scale = pm.HalfNormal("scale", 0.5)
        pm.Normal("y", x.sum(), scale, observed=np.array([2048.0, 2049.0]))
    return model


def test_float32_models_are_computed_in_float64():
    theta = np.array([[1024.0 + 1e-6, 1024.5, -0.3], [1024.0 + 2e-6, 1024.5, -0.3]])
    with pytensor.config.change_flags(floatX="float32"):
        single = LogDensity(shifted_model(), "quick")
        results = [single.logp(theta), *single.logp_grad(theta), single.hessian(theta)]
    double = LogDensity(shifted_model(), "quick")
    expected = [double.logp(theta), *double.logp_grad(theta), double.hessian(theta)]
    for value, reference in zip(results, expected, strict=True):
        assert value.dtype == np.float64
        # Sums near 2048 enter to the power of two; single precision would be 1e-7 off at best, 1e-3 by cancellation.
        np.testing.assert_allclose(value, reference, rtol=1e-10)
    assert results[0][0] != results[0][1]


# --- the choice of a backend ------------------------------------------------------------------------------------------


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"'auto', 'quick', 'numba', 'c', 'jax'; got 'torch'"):
        LogDensity(models.bernoulli_logit(), "torch")


@pytest.mark.parametrize(("check_bounds", "outside"), [(True, -np.inf), (False, np.nan)])
def test_check_bounds_of_the_model_is_kept(check_bounds, outside):
    with pm.Model(check_bounds=check_bounds) as model:
        pm.Normal("y", 0.1, pm.Flat("x"), observed=0.3)
    np.testing.assert_array_equal(LogDensity(model, "quick").logp(np.array([[-1.0]])), [outside])


def test_an_operation_without_a_pullback_leaves_the_gradient():
    """The hypergeometric function has a loop, of which PyTensor has a first derivative, but no second one."""
    with pm.Model() as model:
        shape = pm.HalfNormal("shape", 2.0)
        pm.Potential("function", -pt.hyp2f1(shape, 1.5, 2.5, 0.3))
    density = LogDensity(model)
    assert not density.has_hessian
    point = np.array([[0.3]])
    step = 1e-5
    slope = (density.logp(point + step) - density.logp(point - step)) / (2 * step)
    np.testing.assert_allclose(density.grad(point)[:, 0], slope, rtol=1e-6)


def crossed():
    """Two crossed factors, a scale, and a node that wraps a graph of its own."""
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        a, b = pm.Normal("a", 0.0, sd, shape=12), pm.Normal("b", 0.0, 1.0, shape=11)
        eta = a[rng.integers(12, size=60)] + b[rng.integers(11, size=60)]
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(2, size=60))
        pm.Potential("soft", -pm.math.logsumexp(a))
    return model


def few_dims():
    """So few that the Hessian counts as dense, and a call takes longer than its work."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=4)
        pm.Potential("soft", -pm.math.logsumexp(x))
        pm.Normal("y", pm.math.exp(x).sum(), pm.math.exp(x[0]), observed=np.arange(5.0))
    return model


ASKED = {
    "gradient": lambda density, theta, along: density.logp_grad(theta)[1],
    "products of one draw": lambda density, theta, along: density.hessian_products(theta[:1], along),
    "products of draws": lambda density, theta, along: density.mean_hessian(theta).products(along),
    "diagonal": lambda density, theta, along: density.mean_hessian(theta).diagonal(),
}


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("make", [crossed, few_dims])
def test_bits_do_not_depend_on_what_was_asked_before(make):
    """Graphs share nodes, and functions could serve for one another: none of it may show."""
    first = LogDensity(make(), "quick")
    theta = first.initial_point() + 0.5 * np.random.default_rng(2).standard_normal((8, first.n_dim))
    along = np.eye(first.n_dim)[:3]
    expected = {name: ask(first, theta, along) for name, ask in ASKED.items()}
    second = LogDensity(make(), "quick")
    for name in reversed(ASKED):
        np.testing.assert_array_equal(ASKED[name](second, theta, along), expected[name], err_msg=name)


# --- constrained values -----------------------------------------------------------------------------------------------


def with_deterministics():
    model = models.transformed()
    with model:
        pm.Deterministic("product", model["scale"] * model["edge"], dims="row")
        pm.Deterministic("cut", pt.concatenate([model["part"][:1], model["beta"][0]]).sum())
        pm.Deterministic("fixed", pt.as_tensor([1.5, 2.5]))
    return model


def simplex_model():
    with pm.Model(coords={"k": list("abc"), "g": [1, 2]}) as model:
        p = pm.Dirichlet("p", np.ones((2, 3)), dims=("g", "k"))
        steps = pm.Normal("steps", dims="k", transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1])
        pm.Uniform("u", 0, p[0, 0])  # its transform depends on another variable
        pm.Deterministic("both", p * steps, dims=("g", "k"))
    return model


def plain_model():
    with pm.Model() as model:
        x, a = pm.Data("x", np.arange(3.0)), pm.Normal("a", shape=2)
        pm.Deterministic("data_only", x * 2)
        pm.Deterministic("sign", a > 0)
        pm.Deterministic("length", x.shape[0])
        pm.Deterministic("same", a)
    return model


def constrained_by_pymc(model, density, theta):
    """Evaluate the same names by PyMC's own graph, draw by draw."""
    with model, without_c():
        values = model.replace_rvs_by_values(model.unobserved_value_vars)
        function = pymc_compile(model.value_vars, values, mode=python_mode(), on_unused_input="ignore")
        rows = [function(*density.layout.unflatten(row).values()) for row in theta]
    return {v.name: np.stack([row[i] for row in rows]) for i, v in enumerate(model.unobserved_value_vars)}


OF_VALUES = {"deterministics": with_deterministics, "simplex": simplex_model, "plain": plain_model}


@pytest.mark.parametrize("name", [*OF_VALUES, "scan", "lkj", "zero_sum", "imputed", "zero_size"])
def test_constrained_values_equal_pymc(name, monkeypatch):
    """In batches, in whatever order, and after pickling."""
    monkeypatch.setattr(on_draws, "MOST_AT_ONCE", 3)
    density = LogDensity((models.FEATURES | OF_VALUES)[name](), "quick")
    theta, constrainer = models.random_points(density, 7, 4), Constrainer(density)
    expected = constrained_by_pymc(density.model, density, theta)
    for values in (constrainer(theta), pickle.loads(cloudpickle.dumps(constrainer))(theta)):
        assert list(values) == list(expected)
        for key, value in values.items():
            assert value.shape == expected[key].shape
            np.testing.assert_allclose(value, expected[key], rtol=1e-11, atol=1e-12, err_msg=key)
    names = Constrainer(density, deterministics=False)(theta[:1])
    assert {"product", "cut", "fixed"}.isdisjoint(names)


def test_everything_has_the_data_of_the_moment():
    """Also where these grow."""
    with pm.Model() as model:
        x, y = pm.Data("x", np.array([1.0, 2.0])), pm.Data("y", np.zeros(2))
        scale = pm.HalfNormal("scale", 1.3)
        line = pm.Deterministic("line", scale * x)
        pm.Normal("seen", line, 1.0, observed=y)
    density = LogDensity(model, "quick")
    constrainer, theta = Constrainer(density), np.log(np.arange(1.0, 7.0))[:, None]
    for values in ([1.0, 2.0], [3.0, -1.0], np.arange(20.0), [5.0]):
        new = np.array(values)
        pm.set_data({"x": new, "y": new + 1.0}, model=model)
        lines = np.exp(theta) * new
        np.testing.assert_allclose(constrainer(theta)["line"], lines, rtol=1e-14)
        expected = stats.norm.logpdf(new + 1.0, lines).sum(axis=1) + theta[:, 0]
        expected += stats.halfnorm(scale=1.3).logpdf(np.exp(theta[:, 0]))
        now = density.again("quick") if len(new) == 2 else LogDensity(model, "quick")
        np.testing.assert_allclose(now.logp(theta), expected, rtol=1e-12)


def test_random_deterministics_differ_between_draws_and_repeat_by_seed():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.3)
        pm.Deterministic("noise", pm.Normal.dist(0.0, scale, shape=3))
        pm.Deterministic("free_noise", pm.Normal.dist(shape=2))
    constrainer, theta = Constrainer(LogDensity(model, "quick")), np.zeros((4, 1))
    first, again = constrainer(theta, random_seed=1), constrainer(theta, random_seed=1)
    other = constrainer(theta, random_seed=2)
    for name in ("noise", "free_noise"):
        assert len(np.unique(first[name])) == first[name].size
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).all()
    large = constrainer(theta + 20.0, random_seed=1)
    np.testing.assert_allclose(large["noise"], np.exp(20.0) * first["noise"], rtol=1e-9)


def test_float32_models_give_float32_draws_which_may_overflow():
    with pytensor.config.change_flags(floatX="float32"):
        density = LogDensity(with_deterministics(), "quick")
        values = Constrainer(density)(models.random_points(density, 2, 5))
    for name in ("scale", "product", "z", "scale_log__"):
        assert values[name].dtype == np.float32
    double = LogDensity(with_deterministics(), "quick")
    assert np.isinf(Constrainer(double)(np.full((1, double.n_dim), 1000.0))["scale"]).all()  # and no warning


def test_what_is_added_to_a_model_after_a_fit_is_left_to_predictions():
    """As the values of a Gaussian process elsewhere: they are no part of what was fitted."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Deterministic("twice", 2.0 * x)
        pm.Normal("y", x, 1.0, observed=1.0)
    density = LogDensity(model)
    assert set(Constrainer(density)(np.array([[0.3], [0.5]]))) == {"x", "twice"}
    with model:
        new = pm.LogNormal("new", x, 1.0)
        pm.Deterministic("of_new", 2.0 * new)
        pm.Deterministic("more", 3.0 * x)
    after = Constrainer(density)(np.array([[0.3], [0.5]]))
    assert set(after) == {"x", "twice", "more"}
    np.testing.assert_allclose(after["more"], [0.9, 1.5])
