"""Scalar operations of PyTensor: the form of each, and its name in programs, where its derivatives are."""

import enum
import itertools

import pytensor.scalar as ps
import pytensor.scalar.math as psm

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.graphs.programs import NAMES
from pymc_ngvi.rows.programs.operations import OPERATIONS, Operation


class ScalarForm(enum.Enum):
    """What is known of a scalar operation."""

    SUM = "linear in all arguments together"
    PRODUCT = "linear in each argument, given the others"
    QUOTIENT = "linear in the first argument, given the second"
    CHOICE = "the second argument or the third"
    STEP = "constant but for jumps"
    SMOOTH = "a function with second derivatives"
    FUNCTION = "a function that nothing is known of"

    def linear_in(self, n: int) -> range:
        """Return the places of the arguments, of ``n``, in each of which it is linear, given the others."""
        if self in (ScalarForm.SUM, ScalarForm.PRODUCT):
            return range(n)
        return {ScalarForm.QUOTIENT: range(1), ScalarForm.CHOICE: range(1, 3)}.get(self, range(0))

    def multiplied(self, n: int) -> list[tuple[int, int]]:
        """Return the pairs of arguments that multiply each other, or of which one divides the other."""
        if self is ScalarForm.PRODUCT:
            return list(itertools.combinations(range(n), 2))
        return [(0, 1)] if self is ScalarForm.QUOTIENT else []

    @classmethod
    def of(cls, node: Apply) -> "ScalarForm":
        """Return the form of a node; of none that goes element by element, nothing is known."""
        if not isinstance(node.op, Elemwise):
            return cls.FUNCTION
        return next((FORMS[kind] for kind in type(node.op.scalar_op).__mro__ if kind in FORMS), cls.FUNCTION)


FORMS: dict[type, ScalarForm] = {
    **dict.fromkeys((ps.Add, ps.Sub, ps.Neg, ps.Identity, ps.Cast, ps.Second), ScalarForm.SUM),
    ps.Mul: ScalarForm.PRODUCT,
    ps.TrueDiv: ScalarForm.QUOTIENT,
    ps.Switch: ScalarForm.CHOICE,
    **dict.fromkeys(
        (ps.LogicalComparison, ps.FixedLogicalComparison, ps.AND, ps.OR, ps.XOR, ps.Invert), ScalarForm.STEP
    ),
    **dict.fromkeys(
        (ps.Sign, ps.Floor, ps.Ceil, ps.Trunc, ps.RoundHalfToEven, ps.RoundHalfAwayFromZero), ScalarForm.STEP
    ),
    ps.IntDiv: ScalarForm.STEP,
    **dict.fromkeys((ps.Exp, ps.Expm1, ps.Log, ps.Log1p, ps.Sqr, ps.Sqrt, ps.Pow, ps.Reciprocal), ScalarForm.SMOOTH),
    **dict.fromkeys((ps.Abs, ps.Tanh, ps.Sin, ps.Cos, ps.ScalarMaximum, ps.ScalarMinimum), ScalarForm.SMOOTH),
    **dict.fromkeys((psm.Sigmoid, psm.Softplus, psm.GammaLn), ScalarForm.SMOOTH),
}


def register(kind: type, name: str, scalar: Operation, form: ScalarForm = ScalarForm.FUNCTION) -> None:
    """Add a scalar operation."""
    NAMES[kind], OPERATIONS[name], FORMS[kind] = name, scalar, form


def differentiable_inputs(node: Apply) -> list[Variable]:
    """Return the inputs on which the derivatives of a node's outputs can depend: not the condition of a switch."""
    form = ScalarForm.of(node)
    if form is ScalarForm.STEP:
        return []
    is_second = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second)
    return list(node.inputs[1:] if form is ScalarForm.CHOICE or is_second else node.inputs)
