"""Rows as programs: operation by operation, values and two derivatives are those of PyTensor; and how they are run."""

import functools
import itertools

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from operations import with_branches

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.graphs import graph, programs
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.programs import program_of, read
from pymc_ngvi.rows import engines
from pymc_ngvi.rows import programs as operations
from pymc_ngvi.rows.engines import ENGINES, Engine, OnJax
from pymc_ngvi.rows.expectation import RowFunction, SummedRowFunction
from pymc_ngvi.rows.programs import OPERATIONS, CannotFollow, OnNumPy, Writer, separated
from pymc_ngvi.rows.row_hessian import SecondDerivatives

ANY = np.array([-3.7, -1.2, -0.4, 0.3, 0.9, 2.6, 4.1])
POSITIVE = np.array([0.05, 0.4, 0.9, 1.7, 3.2, 8.5, 40.0])
WITHIN = np.array([-0.95, -0.6, -0.1, 0.2, 0.5, 0.8, 0.97])
FAR = np.array([-1e9, -800.0, -40.0, -1e-9, 0.0, 1e-9, 40.0, 800.0, 1e9])

#: Functions of one number, with points where they are smooth, and points far out.
OF_ONE = {
    "neg": (lambda x: -x, ANY, FAR), "sqr": (pt.sqr, ANY, FAR), "sqrt": (pt.sqrt, POSITIVE, FAR[6:]),
    "reciprocal": (pt.reciprocal, ANY, FAR[:3]), "abs": (pt.abs, ANY, FAR[:3]), "exp": (pt.exp, ANY, FAR[:7]),
    "exp2": (pt.exp2, ANY, FAR[1:7]), "expm1": (pt.expm1, ANY, FAR[:7]), "log": (pt.log, POSITIVE, FAR[5:]),
    "log2": (pt.log2, POSITIVE, FAR[5:]), "log10": (pt.log10, POSITIVE, FAR[5:]),
    "log1p": (pt.log1p, POSITIVE, FAR[3:]), "log1mexp": (pt.log1mexp, -POSITIVE, FAR[1:4]),
    "softplus": (pt.softplus, ANY, FAR), "sigmoid": (pt.sigmoid, ANY, FAR),
    "sin": (pt.sin, ANY, FAR[3:7]), "cos": (pt.cos, ANY, FAR[3:7]), "tan": (pt.tan, WITHIN, FAR[3:6]),
    "arcsin": (pt.arcsin, WITHIN, FAR[3:6]), "arccos": (pt.arccos, WITHIN, FAR[3:6]),
    "arctan": (pt.arctan, ANY, FAR[2:7]), "sinh": (pt.sinh, ANY, FAR[2:7]), "cosh": (pt.cosh, ANY, FAR[2:7]),
    "tanh": (pt.tanh, ANY, FAR[2:7]), "arcsinh": (pt.arcsinh, ANY, FAR[2:7]),
    "arccosh": (pt.arccosh, 1.0 + POSITIVE, FAR[6:7]), "arctanh": (pt.arctanh, WITHIN, FAR[3:6]),
    "gamma": (pt.gamma, POSITIVE, FAR[6:7]), "gammaln": (pt.gammaln, POSITIVE, FAR[5:8]),
    "psi": (pt.psi, POSITIVE, FAR[6:8]), "erf": (pt.erf, ANY, FAR[2:7]), "erfc": (pt.erfc, ANY, FAR[2:7]),
    "erfcx": (pt.erfcx, ANY, FAR[4:7]), "erfinv": (pt.erfinv, WITHIN, FAR[3:6]),
    "erfcinv": (pt.erfcinv, 1.0 + WITHIN, FAR[4:5] + 1.0), "i0": (pt.i0, POSITIVE, FAR[6:7]),
    "i1": (pt.i1, POSITIVE, FAR[6:7]), "j0": (pt.j0, POSITIVE, FAR[6:7]), "j1": (pt.j1, POSITIVE, FAR[6:7]),
    "ive": (lambda x: pt.ive(1.5, x), POSITIVE, FAR[6:7]), "kve": (lambda x: pt.kve(1.5, x), POSITIVE, FAR[6:7]),
    "jv": (lambda x: pt.jv(1.5, x), POSITIVE, FAR[6:7]),
    "cube": (lambda x: x**3, ANY, FAR), "power": (lambda x: x**-1.7, POSITIVE, FAR[6:8]),
    "floor": (lambda x: pt.floor(x) * x, ANY, FAR[:3]), "ceil": (lambda x: pt.ceil(x) * x, ANY, FAR[:3]),
    "trunc": (lambda x: pt.trunc(x) * x, ANY, FAR[:3]), "sign": (lambda x: pt.sign(x) * x**2, ANY, FAR[:3]),
    "rint": (lambda x: pt.round(x, mode="half_to_even") * x, ANY, FAR[:3]),
    "round away": (lambda x: pt.round(x, mode="half_away_from_zero") * x, ANY, FAR[:3]),
    "log of a logistic function": (lambda x: pt.log(pt.sigmoid(x)), ANY, FAR),
    "log of one less": (lambda x: pt.log1p(-pt.sigmoid(x)), ANY, FAR),
    "log of 1 + exp": (lambda x: pt.log1p(pt.exp(x)), ANY, FAR),
    "conditions": (
        lambda x: pt.switch((x > 0.25) & ~(x >= 3.0) | pt.isnan(x) | pt.isinf(x), x**3, pt.exp(x)), ANY, FAR[:6]
    ),
    "equal": (lambda x: pt.switch(pt.eq(x, 0.9) ^ pt.neq(x, 2.6), x**3, pt.exp(x)), ANY, FAR[:6]),
    "cast": (lambda x: pt.cast(x > 0.25, "float64") * x**2 + pt.cast(x, "int64") * x, ANY, FAR[1:7]),
    "between": (lambda x: pt.clip(x, -0.5, 0.8) ** 2, ANY, FAR[:3]),
}  # fmt: skip

#: Functions of several, with points for each.
OF_SEVERAL = {
    "add": (lambda x, y: (x + y + 2.0 + x) ** 2, ANY, ANY), "sub": (lambda x, y: (x - y) ** 3, ANY, ANY),
    "mul": (lambda x, y: x * y * 3.0 * x, ANY, ANY), "div": (lambda x, y: x / y, ANY, POSITIVE),
    "pow": (lambda x, y: x**y, POSITIVE, ANY), "arctan2": (pt.arctan2, ANY, POSITIVE),
    "maximum": (lambda x, y: pt.maximum(x, y + 0.1) ** 2, ANY, ANY),
    "minimum": (lambda x, y: pt.minimum(x, y + 0.1) ** 2, ANY, ANY),
    "mod": (lambda x, y: (x % y) ** 2, ANY, 1.013 * POSITIVE),
    "quotient": (lambda x, y: (x // y) * x * y, ANY, 1.013 * POSITIVE),
    "logaddexp": (lambda x, y: pt.logaddexp(x, 2.0 * y), ANY, ANY),
    "switch": (lambda x, y: pt.switch(x > y + 0.1, x**2 * y, pt.exp(y)), ANY, ANY),
    "clip": (lambda x, y: pt.clip(x, y - 0.35, y + 0.65) ** 2, ANY, ANY),
    "owens_t": (pt.owens_t, ANY, ANY), "gammainc": (pt.gammainc, POSITIVE, POSITIVE),
    "gammaincc": (pt.gammaincc, POSITIVE, POSITIVE),
    "betainc": (pt.betainc, POSITIVE[1:], POSITIVE[1:], np.array([0.1, 0.5, 0.8])),
    "three": (lambda x, y, z: pt.logaddexp(pt.logaddexp(x, y), z) + pt.sqr(x) * z / y, ANY[:3], POSITIVE, ANY),
}  # fmt: skip


def by_pytensor(function, points):
    """Value, first and second derivatives, the lower triangle row by row, by graphs."""
    inputs = [pt.matrix(dtype="float64", shape=(1, None)) for _ in points]
    with without_c():
        [value] = with_branches(programs.with_derivatives([function(*inputs)]))
        outputs = [value]
        first = graph.slopes(value.sum(), inputs, "first")
        outputs += [pt.zeros_like(value) if d is None else d for d in first]
        for a, slope in enumerate(first):
            second = [None] * (a + 1) if slope is None else graph.slopes(slope.sum(), inputs[: a + 1], "second")
            outputs += [pt.zeros_like(value) if d is None else d for d in second]
        compiled = pytensor.function(inputs, outputs, mode=quick_mode(), on_unused_input="ignore")
        return [np.broadcast_to(out, (1, points[0].size))[0] for out in compiled(*[p.reshape(1, -1) for p in points])]


def by_program(function, points):
    """The same by a program."""
    inputs = [pt.matrix(dtype="float64", shape=(1, None)) for _ in points]
    writer, [value] = read(inputs, programs.with_derivatives([function(*inputs)]))
    zero = writer.constant(0.0)
    first = [writer.slope(value, slot) or zero for slot in writer.inputs]
    second = [writer.slope(first[a], writer.inputs[b]) or zero for a in range(len(first)) for b in range(a + 1)]
    run = OnNumPy(writer.written([value, *first, *second]))
    return [np.broadcast_to(out, (1, points[0].size))[0] for out in run(*[p.reshape(1, -1) for p in points])]


def compare(function, points, rtol):
    with np.errstate(all="ignore"):
        expected, found = by_pytensor(function, points), by_program(function, points)
    for one, other in zip(expected, found, strict=True):
        there = np.isfinite(one)
        assert_allclose(other[there], one[there], rtol=rtol, atol=rtol * np.abs(one[there]).max(initial=1.0))
        assert not np.isfinite(other[np.isinf(one)]).any()


@pytest.mark.parametrize("name", OF_ONE)
def test_operations_of_one_number(name):
    function, points, far = OF_ONE[name]
    compare(function, [points], 1e-13)
    compare(function, [far], 1e-12)


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_operations_of_several(name):
    function, *axes = OF_SEVERAL[name]
    points = [p.ravel() for p in np.meshgrid(*axes)]
    compare(function, points, 1e-9 if "inc" in name else 1e-12)  # tails are found by quadrature


def test_every_operation_is_tried():
    assert set(OPERATIONS) - set(operations_tried()) == set()


def operations_tried():
    """How many arguments each operation has in programs of these functions, and of their derivatives."""
    tried = {}
    for function, *axes in [*((f, p) for f, p, _ in OF_ONE.values()), *OF_SEVERAL.values()]:
        inputs = [pt.matrix(dtype="float64") for _ in axes]
        writer, [value] = read(inputs, programs.with_derivatives([function(*inputs)]))
        slopes = [s for slot in writer.inputs if (s := writer.slope(value, slot)) is not None]
        slopes += [s for a, b in itertools.product(slopes, writer.inputs) if (s := writer.slope(a, b)) is not None]
        tried |= {call.name: len(call.read) for call in writer.written([value, *slopes]).calls}
    return tried


#: Left to PyTensor: those that JAX lacks, and those in which it is less exact.
NOT_BY_JAX = {
    "iv", "ive", "kve", "j0", "j1", "jv", "owens_t", "gammainc", "gammaincc", "betainc", "gammainc_k", "gammainc_kk",
    "betainc_a", "betainc_b", "betainc_aa", "betainc_ab", "betainc_bb",
}  # fmt: skip


def test_operations_by_jax(monkeypatch):
    pytest.importorskip("jax", reason="JAX is not installed")
    monkeypatch.setattr(engines, "_FEW", 0)
    writer, values, left = Writer(5, [3, 4]), {}, set()
    x, y, positive, *conditions = writer.inputs
    for name, n_arguments in operations_tried().items():
        arguments = [positive if "gamma" in name else x, y, x]
        if name in ("and", "or", "xor", "not", "switch"):
            arguments[:2] = [conditions[0], y] if name == "switch" else conditions
        value = writer.call(name, *arguments[:n_arguments])
        try:
            OnJax(writer.written([value]))
        except CannotFollow:
            left.add(name)
        else:
            values[name] = value
    assert left == NOT_BY_JAX
    program = writer.written(list(values.values()))
    grid = np.concatenate([ANY, POSITIVE, WITHIN, FAR[1:-1]])[:, None]
    points = [grid, grid.T, POSITIVE[None, :].repeat(4, axis=1)[:, : len(grid)], grid > 0.4, grid.T > 1.0]
    found, expected = OnJax(program)(*points), OnNumPy(program)(*points)
    for name, one, other in zip(values, found, expected, strict=True):
        assert_allclose(one, other, rtol=1e-12, atol=np.finfo(float).tiny, err_msg=name)  # JAX has no smaller numbers


def test_conditions_that_are_data():
    which, x = pt.tensor(dtype="bool", shape=(1, None)), pt.matrix(dtype="float64")
    program = program_of([x, which], [pt.switch(which, pt.exp(x), -x) + which])
    assert program.conditions == (1,)
    values, are = np.array([[0.5, 1.5], [-0.5, 2.0]]), np.array([[True, False]])
    [found] = OnNumPy(program)(values, are)
    assert_allclose(found, np.where(are, np.exp(values), -values) + are)


@pytest.mark.parametrize(
    "make",
    [lambda x: x.cumsum(axis=0), lambda x: x[::-1], lambda x: x + np.ones((1, 3)), lambda x: x.T],
    ids=["sums", "elements", "arrays", "transposed"],
)
def test_what_is_not_element_by_element_is_refused(make):
    x = pt.matrix(dtype="float64")
    with pytest.raises(CannotFollow):
        program_of([x], [make(x)])


@pytest.mark.parametrize("cached", [1, 5, 64, 10**6])
def test_parts_are_the_whole(cached, monkeypatch):
    rng = np.random.default_rng(1)
    inputs = [pt.tensor(dtype="float64", shape=(None, None, None)) for _ in range(3)]
    x, y, z = inputs
    program = program_of(inputs, [pt.exp(x) * y + pt.softplus(z * y), pt.log1p(pt.exp(x)) * 2.0, pt.exp(y) + z])
    values = [rng.normal(size=shape) for shape in ((1, 4, 1), (6, 1, 5), (1, 1, 5))]
    expected = OnNumPy(program)(*values)
    monkeypatch.setattr(operations, "_CACHED", cached)
    before = [v.copy() for v in values]
    run = OnNumPy(program)
    for _ in range(2):
        for one, other in zip(run(*values), expected, strict=True):
            assert_allclose(one, other, rtol=1e-15)
    for one, other in zip(values, before, strict=True):
        assert_array_equal(one, other), "inputs are not written over"
    assert [out.shape for out in run(*values)] == [(6, 4, 5), (1, 4, 1), (6, 1, 5)]
    assert run(values[0], values[1][:0], values[2])[0].shape == (0, 4, 5)


def test_values_as_sums_of_products():
    u, v, x, z = (pt.matrix(dtype="float64") for _ in range(4))
    value = pt.exp(u) * x - (v + x * 2.0) * z / pt.exp(u) + 3.0
    writer, [written] = read([u, v, x, z], [value])
    found = separated(writer, written, [0, 1])
    for one, other in found:
        assert writer.inputs_of(one) <= {0, 1}
        assert writer.inputs_of(other) <= {2, 3}
    factors = OnNumPy(writer.written([f for pair in found for f in pair]))
    rng = np.random.default_rng(2)
    points = [rng.normal(size=shape) for shape in ((5, 1), (5, 1), (1, 4), (1, 4))]
    parts = factors(*points)
    total = sum(np.broadcast_to(a * b, (5, 4)) for a, b in zip(parts[::2], parts[1::2], strict=True))
    assert_allclose(total, np.broadcast_to(OnNumPy(writer.written([written]))(*points)[0], (5, 4)), rtol=1e-12)
    [(whole, one)] = separated(writer, writer.call("exp", written), [0, 1])
    assert one.number == 1.0
    assert whole.name == "exp"


def test_rows_that_are_not_known_are_left_to_pytensor():
    """Second derivatives are those of the whole graph."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=4)
        pm.Potential("tail", pt.gammaincinv(2.0, pm.math.sigmoid(x)).sum())
    density = LogDensity(model)
    rows = density.rows
    assert rows is not None
    assert {kind.function.__name__ for kind in rows.functions} == {"flattened"}
    theta = 0.3 * np.random.default_rng(3).standard_normal((5, 4))
    assert_allclose(rows.at(theta), density.logp(theta), rtol=1e-10)
    [kind] = rows.terms.rows
    assert rows.engine.derivatives(kind, SecondDerivatives) is None
    step = 1e-5
    slopes = [density.logp_grad(theta + sign * step)[1] for sign in (1.0, -1.0)]
    expected = (slopes[0] - slopes[1]).mean(axis=0) / (2.0 * step)
    assert_allclose(density.mean_hessian(theta).diagonal(), expected, rtol=1e-6)


@pytest.mark.parametrize("engine", ["quick", "jax"])
def test_sums_by_each_engine(engine, monkeypatch):
    """Slopes that are functions of scales, of data, of both together, and of neither."""
    if engine == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
        monkeypatch.setattr(engines, "_FEW", 0)
    monkeypatch.setitem(ENGINES, "quick", ENGINES[engine])
    rng, group = np.random.default_rng(4), np.arange(24) % 4
    with pm.Model() as model:
        sd, z, t = pm.HalfNormal("sd", shape=3), pm.Normal("z", shape=(4, 3)), pm.Normal("t", shape=24)
        mixed = t * pt.log1p(sd[2] * rng.random(24))
        eta = z[group, 0] * sd[0] + z[group, 1] * (sd[1] * rng.random(24) + sd[0]) + mixed + z[group, 2]
        pm.Bernoulli("y", logit_p=eta, observed=rng.integers(2, size=24))
    density = LogDensity(model)
    kinds = [kind for kind in density.rows.functions if isinstance(kind, SummedRowFunction)]
    assert sum(len(rows.index) for rows in kinds) == 24
    for rows in kinds:
        assert rows.n_summed == 4
        n, k = rows.index.shape
        mean, root = np.full((n, k), 0.1), np.tril(rng.random((n, k, k)))
        mean[:, : rows.n_others] = mean[0, : rows.n_others]
        root = 0.05 * (root + 3.0 * np.eye(k))
        root[:, : rows.n_others] = root[0, : rows.n_others]
        plain = RowFunction(rows.function, rows.index, rows.data, rows.interacts)
        finest = [np.full(n, code, dtype=np.int16) for code in (0x33, 0x3)]
        found, expected = (f.whitened(mean, root, c, np.arange(n)) for f, c in zip((rows, plain), finest, strict=True))
        assert_allclose(found, expected, atol=2e-5)


def run_plainly(program):
    """Evaluate a program as it is written: all that an engine of programs has to have."""

    def run(*inputs):
        values = [*inputs, *map(np.float64, program.constants)]
        with np.errstate(all="ignore"):
            for call in program.calls:
                values.append(OPERATIONS[call.name].function(*[values[k] for k in call.read]))
        return [np.asarray(values[k]) for k in program.outputs]

    return run


def test_an_engine_takes_one_entry(monkeypatch):
    """A backend of its name goes by it, and gives the same fit."""
    made = []
    monkeypatch.setitem(ENGINES, "plain", functools.partial(Engine, lambda p: made.append(p) or run_plainly(p)))
    rng, group = np.random.default_rng(5), np.arange(40) % 5
    with pm.Model() as model:
        rate = pt.exp(pm.Normal("level") + pm.HalfNormal("sd") * pm.Normal("z", shape=5)[group])
        pm.NegativeBinomial("y", mu=rate, alpha=2.0, observed=rng.poisson(2.0, size=40))
    plain, quick = (
        fit_ngvi(model=model, family="full", backend=backend, random_seed=1, progressbar=False)
        for backend in ("plain", "quick")
    )
    assert made
    assert (plain.backend, plain.n_iterations) == ("plain", quick.n_iterations)
    assert_allclose(plain.elbo.value, quick.elbo.value, rtol=1e-10)
    for name, values in quick.mean_data.items():
        assert_allclose(plain.mean_data[name], values, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="'jax', 'plain'; got 'fast'"):
        LogDensity(model, "fast")
