"""Operations of graphs: each reading of each has an answer or a refusal in words; a new one takes a record alone."""

import contextlib
import dataclasses

import numpy as np
import pymc as pm
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest

from operations import GRAPHS, OTHERS, UNIVARIATE
from pymc.distributions import continuous, discrete
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.programs import program_of
from pymc_ngvi.ops import elements, registry
from pymc_ngvi.ops.elements import Facts, ScalarForm
from pymc_ngvi.ops.jets import forward_mode
from pymc_ngvi.reading.predictors import Dependences, PatternSearch, is_linear
from pymc_ngvi.rows.programs import CannotFollow
from pymc_ngvi.rows.programs import CannotFollow as NoProgram
from pymc_ngvi.rows.programs import Operation as ScalarOperation

READINGS = [field.name for field in dataclasses.fields(registry.OpRecord) if field.name != "by_batch"]


def nodes_of(name):
    """Return the nodes of a graph, simplified, and of its gradient, if it has one."""
    output, unknown = GRAPHS[name]()
    outputs = graph.simplify([output])
    if unknown:
        with contextlib.suppress(NotImplementedError):
            outputs += graph.simplify(pytensor.grad(outputs[0], unknown, disconnected_inputs="ignore"))
    return list(toposort(outputs))


def assert_in_words(refusal):
    assert " " in refusal
    assert refusal[0].islower()
    assert not refusal.endswith(".")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PyMC's own calls of PyTensor
@pytest.mark.parametrize("name", GRAPHS)
def test_each_reading_has_an_answer_or_a_refusal_in_words(name):
    for node in nodes_of(name):
        found = registry.operation(node.op)
        assert found is not registry.UNKNOWN, node.op
        for reading in READINGS:
            answer = getattr(found, reading)
            if not callable(answer):
                assert_in_words(answer)
        if isinstance(node.op, Elemwise):
            assert_program_or_words(node)


def assert_program_or_words(node):
    inputs = [pt.scalar(dtype=i.type.dtype) for i in node.inputs]
    refusal = refusal_of(NoProgram, lambda: program_of(inputs, node.op.make_node(*inputs).outputs))
    assert refusal is None or " " in refusal


def refusal_of(kind, make):
    """Return what an exception says, None where there is none."""
    try:
        make()
    except kind as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("name", ["scan", "cholesky", "softmax", "joined", "sorted", "Normal", "multivariate normal"])
def test_jets_follow_or_say_why_not(name):
    output, unknown = GRAPHS[name]()
    theta = pt.vector("theta", dtype="float64", shape=(sum(int(np.prod(var.type.shape)) for var in unknown),))
    parts, start = {}, 0
    for var in unknown:
        size = int(np.prod(var.type.shape))
        parts[var], start = theta[start : start + size].reshape(var.type.shape), start + size
    [logp] = graph.simplify(pytensor.graph.replace.graph_replace([output], parts))
    refusal = refusal_of(CannotFollow, lambda: forward_mode(logp, theta))
    assert refusal is None or " " in refusal


def test_all_distributions_are_tried():
    assert {*continuous.__all__, *discrete.__all__} <= {*UNIVARIATE, *OTHERS}


# --- what follows from how elements are made ---


THETA = pt.vector("theta", shape=(6,))
MATRIX = THETA.reshape((2, 3))
BATCH = np.arange(1.0, 13.0).reshape(2, 2, 3)


def dependence_by_values(function, n_out):
    """Return on which coordinates each element depends, from values at two points."""
    run = pytensor.function([THETA], function.ravel(), mode="FAST_COMPILE")
    point = np.linspace(0.3, 1.1, 6)
    changed = [run(point + step) != run(point) for step in 0.1 * np.eye(6)]
    return np.array(changed).T.reshape(n_out, 6)


MADE = {
    "cumulative sums of all": (pt.cumsum(MATRIX, axis=None), True),
    "cumulative sums along an axis": (pt.cumsum(MATRIX, axis=1), True),
    "cumulative products": (pt.cumprod(MATRIX, axis=0), False),
    "batch of known matrices": (pt.matmul(BATCH, MATRIX.T), True),
    "product from the right": (pt.dot(MATRIX, np.eye(3)[:, :2]), True),
    "choice by data": (pt.switch(BATCH[0] > 3.0, MATRIX, 2.0 * MATRIX[:, :1]), True),
    "zeros among factors": (MATRIX * np.array([0.0, 1.0, 2.0]), True),
    "zero by an unknown": (np.array([0.0, 1.0, 2.0]) / MATRIX, False),
    "added at some": (pt.inc_subtensor(MATRIX[:, [0, 0, 2]], MATRIX), True),
    "set at some": (pt.set_subtensor(MATRIX[0], MATRIX[1]), True),
    "joined and moved": (pt.concatenate([MATRIX[::-1].T, np.ones((1, 2))]), True),
    "largest": (pt.max(MATRIX, axis=1), False),
    "solution": (pt.linalg.solve_triangular(np.tril(np.ones((2, 2))), MATRIX, lower=True), True),
}


@pytest.mark.parametrize("name", MADE)
def test_dependence_and_linearity_are_those_of_values(name):
    made, linear = MADE[name]
    facts = Facts(pt.sum(made), THETA)
    shape = facts.shape(made)
    found = Dependences(facts, THETA).of(made)
    kept = dependence_by_values(made, int(np.prod(shape)))
    told = found.sets.toarray()[found.index.ravel()]
    assert not (kept & ~told).any()
    if name not in ("largest", "batch of known matrices", "solution"):  # of which the largest element alone is seen
        np.testing.assert_array_equal(told, kept)
    assert is_linear(made.owner, facts) is linear


# --- an operation that the package has never heard of ---


class Reversed(Op):
    """A vector from the end to its beginning."""

    __props__ = ()
    gufunc_signature = "(n)->(n)"

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0][..., ::-1].copy()

    def pullback(self, inputs, outputs, cotangents):
        return [self(cotangents[0])]

    L_op = pullback


class Bent(ps.UnaryScalarOp):
    """x + x**3, which no backend has."""

    nfunc_spec = None

    def impl(self, x):
        return x + x**3

    def pullback(self, inputs, outputs, cotangents):
        return [cotangents[0] * (1.0 + 3.0 * inputs[0] ** 2)]

    L_op = pullback


@pytest.fixture
def _registers():
    """What is registered in a test is forgotten."""
    tables = [registry.RECORDS, elements.NAMES, elements.FORMS, elements.OPERATIONS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def reversed_logp():
    theta = pt.vector("theta", shape=(4,))
    return -pt.sum((np.arange(4.0) - Reversed()(theta)) ** 2), theta


@pytest.mark.usefixtures("_registers")
def test_an_unknown_operation_takes_a_record_alone():
    logp, theta = reversed_logp()
    before = PatternSearch(logp, theta).run()
    assert before[0].matrix.nnz == 16
    registry.register({Reversed: registry.moves()})
    after = PatternSearch(logp, theta).run()
    np.testing.assert_array_equal(after[0].matrix.toarray(), np.eye(4))
    assert after[1] == []


@pytest.mark.usefixtures("_registers", "_anew")
@pytest.mark.parametrize("known", [False, True])
def test_rows_are_found_behind_an_unknown_operation(known):
    if known:
        registry.register({Reversed: registry.moves()})
    with pm.Model() as model:
        x = pm.Normal("x", shape=4)
        pm.Poisson("y", pm.math.exp(Reversed()(x)), observed=np.arange(4))
    rows = LogDensity(model).described_rows()
    assert bool(rows.rest) is not known


@pytest.mark.usefixtures("_registers")
def test_an_unknown_scalar_operation_takes_a_record_alone():
    x = pt.scalar("x", dtype="float64")
    output = Elemwise(Bent(ps.upgrade_to_float, name="bent"))(x)
    with pytest.raises(NoProgram, match="not known"):
        program_of([x], [output])
    slopes = lambda y, x: [1.0 + 3.0 * x.to("sqr")]  # noqa: E731
    elements.register(Bent, "bent", ScalarOperation(lambda x: x + x**3, slopes, writes=False), ScalarForm.SMOOTH)
    assert program_of([x], [output]) is not None
    assert ScalarForm.of(output.owner) is ScalarForm.SMOOTH
