"""The quick mode: as stable as PyTensor's default mode, and nothing in it is compiled or runs element by element."""

import functools

import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from models import Reference, check_loops, element_by_element
from operations import Wobble, wobble
from pytensor import scalar as ps
from pytensor.compile.mode import Mode
from pytensor.scalar.math import log1mexp, softplus, tri_gamma

from pymc_ngvi import LogDensity
from pymc_ngvi.core import scalars as ufuncs
from pymc_ngvi.graphs.backends import Interpreted, python_loops, quick_mode, quickly
from pymc_ngvi.graphs.graph import simplify


def test_a_function_that_is_called_a_few_times_gives_what_a_compiled_one_does():
    x, data = pt.vector("x"), pytensor.shared(np.arange(3.0), "data")
    fixed = pt.constant(np.array([1.0, 2.0, 4.0]))
    outputs = [x, fixed, data, pt.softplus(x) + pt.log(2.0 * fixed), x[::-1], pt.cumsum(x * data).sum() * fixed]
    run, compiled = quickly([x], outputs), pytensor.function([x], outputs, mode=quick_mode())
    assert isinstance(run, Interpreted)
    for _ in range(2):
        found = run([0.5, -1.0, 3.0])
        for one, other in zip(found, compiled([0.5, -1.0, 3.0]), strict=True):
            np.testing.assert_array_equal(one, other)
            one[...] = np.nan  # no result is one of the inputs, the data or the constants themselves
        data.set_value(np.array([3.0, -1.0, 0.5]))  # are read at each call
    np.testing.assert_array_equal(quickly([x], x + data)([0.0, 0.0, 0.0]), [3.0, -1.0, 0.5])


def test_what_has_a_graph_of_its_own_is_compiled():
    x = pt.vector("x")
    sums = pytensor.scan(
        lambda value, before: before + value**2, sequences=[x], outputs_info=[pt.zeros(())], return_updates=False
    )
    run = quickly([x], [sums[-1]])
    assert not isinstance(run, Interpreted)
    np.testing.assert_allclose(run(np.array([1.0, 2.0]))[0], 5.0)


def python_reference(model, layout):
    # Fused Elemwise can't run in Python; fusion changes speed only, and so does writing in place. Without a compiler,
    # graphs inside the graph run in Python, too.
    with pytensor.config.change_flags(cxx=""):
        return Reference(model, layout, Mode("py", "fast_run").excluding("fusion", "inplace"))


@functools.cache
def stable_reference(name):
    """Return the reference of a model that is written so that it loses no digits."""
    model = models.STABLE_FORMS[name]()
    return python_reference(model, LogDensity(model, "quick").layout)


def evaluate(density, theta, direction):
    logp, grad = density.logp_grad(theta[None])
    return logp[0], grad[0], density.hessian_products(theta[None], direction[None])[0, 0]


def extreme_points(n_dim, scale, seed):
    """Far points along each axis, far corners, alternating ones, faces and random points of a cube."""
    rng = np.random.default_rng(seed)
    axes = [*np.eye(n_dim), *-np.eye(n_dim)]
    corners = [np.ones(n_dim), -np.ones(n_dim), (-1.0) ** np.arange(n_dim), -((-1.0) ** np.arange(n_dim))]
    faces = list(rng.choice([-1.0, 0.0, 1.0], size=(4, n_dim)))
    return scale * np.array([*axes, *corners, *faces, *rng.normal(size=(2, n_dim))])


@pytest.fixture(scope="module", params=list(models.STABILITY))
def pair(request):
    density = LogDensity(models.STABILITY[request.param](), "quick")
    return request.param, density, python_reference(density.model, density.layout)


def test_agrees_with_the_default_mode_at_moderate_points(pair):
    _, density, reference = pair
    direction = np.random.default_rng(1).normal(size=density.n_dim)
    for theta in models.random_points(density, 3, 1, scale=1.0):
        for name, value, expected in zip(
            ("logp", "grad", "product"), evaluate(density, theta, direction), reference(theta, direction), strict=True
        ):
            # The points are drawn so that nothing over- or underflows: no excuse for NaN on either side.
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-10, err_msg=name)


#: Half the width of the cube of extreme points; beyond it nearly no log density is finite as PyMC writes it.
REACH = {"beta": 300.0, "gamma": 300.0, "ordered": 30.0}


def check_extreme_points(name, density, reference, fraction, seed, rtol):
    """Compare with the reference where it is finite; where the model loses digits as written, lose no more of them.

    A point of which the log density is not finite is left out of a fit, so that its derivatives don't matter.
    """
    exact = stable_reference(name) if name in models.STABLE_FORMS else reference
    direction = np.random.default_rng(seed).normal(size=density.n_dim)
    compared = 0
    for theta in extreme_points(density.n_dim, fraction * REACH.get(name, 1000.0), seed):
        values, expected = evaluate(density, theta, direction), reference(theta, direction)
        bests = exact(theta, direction)
        if not np.isfinite(expected[0]):
            right = np.isfinite(bests[0]) and np.isclose(values[0], bests[0], rtol=rtol)
            assert right or not np.isfinite(values[0]), (theta, values[0])
            assert values[0] != np.inf, theta
            compared += right
            continue
        for what, value, default, best in zip(("logp", "grad", "product"), values, expected, bests, strict=True):
            value, default, best = map(np.atleast_1d, (value, default, best))
            finite = np.isfinite(default) & np.isfinite(best)
            compared += finite.sum()
            # Sums of terms of opposite sign leave the rounding errors of the largest.
            atol = 1e-3 * rtol * np.max(np.abs(best), where=finite, initial=1.0)
            atol += 4.0 * np.max(np.abs(default[finite] - best[finite]), initial=0.0)
            np.testing.assert_allclose(value[finite], best[finite], rtol=rtol, atol=atol, err_msg=f"{what} at {theta}")
            # Signs of infinite derivatives.
            infinite = np.isinf(default)
            assert (value[infinite] != -default[infinite]).all(), (what, theta, value, default)
    return compared


@pytest.mark.parametrize(("fraction", "seed"), [(0.03, 1), (0.3, 1), (1.0, 2)])
def test_is_as_stable_as_the_default_mode_at_extreme_points(pair, fraction, seed):
    name, density, reference = pair
    compared = check_extreme_points(name, density, reference, fraction, seed, rtol=1e-9)
    assert compared >= 10, "too few finite values of the default mode: the test compares nothing"


@pytest.mark.parametrize(
    ("theta", "slope"),
    [(40.0, 1.0), (800.0, 1.0), (1e5, 1.0)],
)
def test_logit_tails_are_exact(theta, slope):
    """log(1 - sigmoid(x)) is -x, not log(0), in the far tail; its curvature dies out instead of being NaN."""
    with pm.Model() as model:
        pm.Flat("x")
        pm.Bernoulli("y", logit_p=model["x"], observed=0)
    density = LogDensity(model, "quick")
    logp, grad = density.logp_grad(np.array([[theta], [-theta]]))
    np.testing.assert_allclose(logp, [-theta, -np.exp(-theta)], rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(grad[:, 0], [-slope, -np.exp(-theta)], rtol=1e-12, atol=1e-300)
    hessian = density.hessian(np.array([[theta], [-theta]]))
    np.testing.assert_allclose(hessian[:, 0, 0], -np.exp(-theta), rtol=1e-10, atol=1e-300)


# --- nothing element by element ---------------------------------------------------------------------------------------


def test_no_python_loops_in_the_likelihoods(pair):
    check_loops(pair[1])


def quick_function(inputs, outputs):
    return pytensor.function(inputs, outputs, mode=quick_mode())


def test_python_loops_are_found():
    x = pt.vector("x")
    function = quick_function([x], wobble(x) + 1.0)
    function(np.ones(2))
    [found] = python_loops(function.maker.fgraph.apply_nodes)
    assert isinstance(found.op.scalar_op, Wobble)
    assert element_by_element(function) == [found]


SCALAR_FUNCTIONS = {
    "softplus": (pt.softplus, [-400.0, -1.3, 0.2, 20.0, 800.0]),
    "log1mexp": (pt.log1mexp, [-400.0, -1.3, -0.2, -1e-12, -1e-300]),
    "trigamma": (pt.tri_gamma, [1e-3, 0.4, 1.0, 30.0, 1e9]),
    "clip": (lambda x: pt.clip(x, -0.5, 1.5), [-2.0, -0.5, 0.1, 1.5, 3.0]),
    "round": (lambda x: pt.round(x, mode="half_away_from_zero"), [-2.5, -0.4, 0.5, 1.5, 2.6]),
    "cube": (lambda x: x**3, [-2.5, -0.4, 0.5, 1.5, 2.6]),
    "fourth_power": (lambda x: x**4, [-2.5, -0.4, 0.5, 1.5, 2.6]),
    "inverse_cube": (lambda x: x**-3, [-2.5, -0.4, 0.5, 1.5, 2.6]),
    "gammaln": (pt.gammaln, [1e-3, 0.4, 1.0, 30.0, 1e9]),
    "digamma": (pt.digamma, [1e-3, 0.4, 1.0, 30.0, 1e9]),
    "erfcx": (pt.erfcx, [-3.0, 0.4, 1.0, 30.0, 1e9]),
    "sigmoid": (pt.sigmoid, [-800.0, -1.0, 0.1, 30.0, 800.0]),
    "switch": (lambda x: pt.switch(x > 0, x, -x), [-2.5, -0.4, 0.5, 1.5, 2.6]),
    "logaddexp": (lambda x: pt.logaddexp(x, 0.3), [-800.0, -1.0, 0.1, 30.0, 800.0]),
    "sum_of_many": (lambda x: sum((x + 0.1 * k for k in range(1, 4)), x), [-2.5, -0.4, 0.5, 1.5, 2.6]),
}


@pytest.mark.parametrize("name", list(SCALAR_FUNCTIONS))
def test_scalar_functions_run_on_numpy_and_agree(name):
    function, values = SCALAR_FUNCTIONS[name]
    x, values = pt.vector("x"), np.array(values)
    quick = quick_function([x], function(x))
    element = pt.scalar("element")
    with pytensor.config.change_flags(cxx=""):
        exact = pytensor.function([element], function(element), mode=Mode("py", None))  # as written, no rewrites
    np.testing.assert_allclose(quick(values), [float(exact(v)) for v in values], rtol=1e-14)
    assert element_by_element(quick) == []


# --- the NumPy versions of scalar functions ---------------------------------------------------------------------------

GRID = np.concatenate(
    [
        [-np.inf, -1e300, -1e10, -1000, -746, -745, -300, -37, -36.7, -30, -4, -3.5, -2.5, -1, -0.6932, -np.log(2)],
        [-0.6931, -0.5, -0.1, -1e-9, -1e-20, -1e-300, -1e-320, 0, 1e-320, 1e-300, 1e-9, 0.3, 0.5, 1, 1.5, 2, 2.5],
        [5, 30, 300, 1e10, 2**52 + 1, 1e300, np.inf, np.nan],
    ]
)


def by_element(scalar_op, *arguments):
    """Evaluate PyTensor's own scalar implementation, element by element."""
    with np.errstate(all="ignore"):
        return np.array([float(scalar_op.impl(*row)) for row in zip(*arguments, strict=True)])


def vectorised(function, *arguments):
    with np.errstate(all="ignore"):  # as PyTensor calls them
        return function(*arguments)


@pytest.mark.parametrize(
    ("function", "scalar_op"),
    [
        pytest.param(ufuncs.log1mexp, log1mexp, id="log1mexp"),
        pytest.param(ufuncs.softplus, softplus, id="softplus"),
        pytest.param(ufuncs.trigamma, tri_gamma, id="trigamma"),
        pytest.param(ufuncs.round_half_away_from_zero, ps.round_half_away_from_zero, id="round"),
    ],
)
def test_ufuncs_agree_with_the_scalar_implementation(function, scalar_op):
    np.testing.assert_allclose(vectorised(function, GRID), by_element(scalar_op, GRID), rtol=1e-15, atol=0)


@pytest.mark.parametrize("low", [0.0, 1.0, -np.inf, np.nan])
@pytest.mark.parametrize("high", [1.0, 0.0, np.inf, np.nan])
def test_clip_agrees_with_the_scalar_implementation(low, high):
    """Also where the lower bound is above the upper one, and for NaN anywhere."""
    bounds = np.full_like(GRID, low), np.full_like(GRID, high)
    np.testing.assert_array_equal(vectorised(ufuncs.clip, GRID, low, high), by_element(ps.clip, GRID, *bounds))


# --- nothing is compiled ----------------------------------------------------------------------------------------------


# --- graphs of awkward size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_operands", [2, 30, 31, 32, 61, 62, 100])
@pytest.mark.parametrize(("combine", "combine_numpy"), [(pt.add, np.add), (pt.mul, np.multiply)], ids=["add", "mul"])
def test_any_number_of_operands(combine, combine_numpy, n_operands):
    operands = [pt.vector() for _ in range(n_operands)]
    values = 1.0 + 0.1 * np.random.default_rng(3).normal(size=(n_operands, 2))
    function = quick_function(operands, combine(*operands))
    np.testing.assert_array_equal(function(*values), combine_numpy.reduce(values))  # in the order as written
    assert element_by_element(function) == []


@pytest.mark.parametrize(
    "rewrite",
    [lambda x, value: quick_function([x], value), lambda x, value: simplify([value])],
    ids=["compiled", "simplified"],
)
def test_notes_of_where_a_constant_came_from_do_not_grow(rewrite):
    """They triple whenever PyTensor simplifies ``switch(condition, 0, 0)``, and the constant is in all graphs."""
    zero = pt.constant(0.0)
    zero.tag.trace = [[("file", 1, "function", "line")]]
    for k in range(8):
        x = pt.scalar(f"x{k}")
        rewrite(x, x + pt.switch(x > 0, zero, zero))
    assert 1 < len(zero.tag.trace) < 100  # it was simplified, and 3^8 notes are left out
