"""Scalar operations of PyTensor: the form of each, and its name in programs, where its derivatives are."""

import enum
import itertools

import pytensor.scalar as ps
import pytensor.scalar.math as psm

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.graphs import incomplete
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
#: Names in `rows.programs.operations` of what has one meaning, whatever the types of their arguments.
NAMES: dict[type, str] = {
    ps.Sub: "sub", ps.TrueDiv: "div", ps.Neg: "neg", ps.Sqr: "sqr", ps.Sqrt: "sqrt", ps.Reciprocal: "reciprocal",
    ps.Abs: "abs", ps.Pow: "pow", ps.Mod: "mod", ps.IntDiv: "floor_divide",
    ps.Exp: "exp", ps.Exp2: "exp2", ps.Expm1: "expm1", ps.Log: "log", ps.Log2: "log2", ps.Log10: "log10",
    ps.Log1p: "log1p", psm.Log1mexp: "log1mexp", psm.Softplus: "softplus", psm.Sigmoid: "sigmoid",
    ps.Sin: "sin", ps.Cos: "cos", ps.Tan: "tan", ps.ArcSin: "arcsin", ps.ArcCos: "arccos", ps.ArcTan: "arctan",
    ps.ArcTan2: "arctan2", ps.Sinh: "sinh", ps.Cosh: "cosh", ps.Tanh: "tanh", ps.ArcSinh: "arcsinh",
    ps.ArcCosh: "arccosh", ps.ArcTanh: "arctanh",
    psm.Gamma: "gamma", psm.GammaLn: "gammaln", psm.Psi: "psi", psm.TriGamma: "trigamma", psm.Erf: "erf",
    psm.Erfc: "erfc", psm.Erfcx: "erfcx", psm.Erfinv: "erfinv", psm.Erfcinv: "erfcinv", psm.Owens_t: "owens_t",
    psm.I0: "i0", psm.I1: "i1", psm.J0: "j0", psm.J1: "j1", psm.Jv: "jv", psm.Ive: "ive", psm.Kve: "kve",
    psm.GammaInc: "gammainc", incomplete.SmoothGammaInc: "gammainc", psm.GammaIncC: "gammaincc",
    incomplete.SmoothGammaIncC: "gammaincc", psm.BetaInc: "betainc", incomplete.SmoothBetaInc: "betainc",
    ps.Switch: "switch", ps.Clip: "clip", ps.LT: "lt", ps.GT: "gt", ps.LE: "le", ps.GE: "ge", ps.EQ: "eq",
    ps.NEQ: "ne", ps.IsNan: "isnan", ps.IsInf: "isinf", ps.Sign: "sign", ps.Ceil: "ceil", ps.Floor: "floor",
    ps.Trunc: "trunc", ps.RoundHalfToEven: "rint", ps.RoundHalfAwayFromZero: "round away",
}  # fmt: skip
#: Those that take any number of arguments.
FOLDED: dict[type, str] = {
    ps.Add: "add", ps.Mul: "mul", ps.ScalarMaximum: "maximum", ps.ScalarMinimum: "minimum",
}  # fmt: skip
#: Those that are of booleans or of the bits of integers.
LOGICAL: dict[type, str] = {ps.AND: "and", ps.OR: "or", ps.XOR: "xor", ps.Invert: "not"}


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
