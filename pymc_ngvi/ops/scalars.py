"""Forms of scalar operations: what the derivatives of a function of numbers are, as far as its kind alone tells."""

import enum
import itertools

import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Variable
from pytensor.scalar.math import GammaLn, Sigmoid, Softplus
from pytensor.tensor.elemwise import Elemwise


class Form(enum.Enum):
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
        if self in (Form.SUM, Form.PRODUCT):
            return range(n)
        return {Form.QUOTIENT: range(1), Form.CHOICE: range(1, 3)}.get(self, range(0))

    def multiplied(self, n: int) -> list[tuple[int, int]]:
        """Return the pairs of arguments that multiply each other, or of which one divides the other."""
        if self is Form.PRODUCT:
            return list(itertools.combinations(range(n), 2))
        return [(0, 1)] if self is Form.QUOTIENT else []

    @classmethod
    def of(cls, node: Apply) -> "Form":
        """Return the form of a node; of none that goes element by element, nothing is known."""
        if not isinstance(node.op, Elemwise):
            return cls.FUNCTION
        return next((form for form, kinds in _KINDS.items() if isinstance(node.op.scalar_op, kinds)), cls.FUNCTION)


_KINDS: dict[Form, tuple[type, ...]] = {
    Form.SUM: (ps.Add, ps.Sub, ps.Neg, ps.Identity, ps.Cast, ps.Second),
    Form.PRODUCT: (ps.Mul,),
    Form.QUOTIENT: (ps.TrueDiv,),
    Form.CHOICE: (ps.Switch,),
    Form.STEP: (
        ps.LogicalComparison, ps.FixedLogicalComparison, ps.AND, ps.OR, ps.XOR, ps.Invert, ps.Sign, ps.Floor, ps.Ceil,
        ps.Trunc, ps.RoundHalfToEven, ps.RoundHalfAwayFromZero, ps.IntDiv,
    ),
    Form.SMOOTH: (
        ps.Exp, ps.Expm1, ps.Log, ps.Log1p, ps.Sqr, ps.Sqrt, ps.Pow, ps.Reciprocal, ps.Abs, ps.Tanh, ps.Sin, ps.Cos,
        ps.ScalarMaximum, ps.ScalarMinimum, Sigmoid, Softplus, GammaLn,
    ),
}  # fmt: skip


def differentiable_inputs(node: Apply) -> list[Variable]:
    """Return the inputs on which the derivatives of a node's outputs can depend: not the condition of a switch."""
    form = Form.of(node)
    if form is Form.STEP:
        return []
    is_second = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second)
    return list(node.inputs[1:] if form is Form.CHOICE or is_second else node.inputs)
