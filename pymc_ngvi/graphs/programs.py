"""Scalar operations: incomplete beta and gamma functions with two derivatives, and programs of operations."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.scalar.math as psm

from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import grad_not_implemented
from pytensor.graph import Apply, Constant, FunctionGraph, Variable, ancestors
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import toposort
from pytensor.scalar import BetaInc, GammaInc, GammaIncC, gammaln, psi, upgrade_to_float_no_complex
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.special import LogAddExp

from pymc_ngvi.core import scalars
from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs.loops import ScalarLogAddExp
from pymc_ngvi.graphs.rewrites import rewritten
from pymc_ngvi.rows.programs import OPERATIONS, CannotFollow, RowProgram, Writer, Written

_HIGHEST_ORDER = 2


class ByParameters(ps.ScalarOp):
    """A derivative of the incomplete beta function I_x(a, b), or the gamma function P(k, x), by parameters."""

    __props__ = ("by",)

    def __init__(self, by: str) -> None:
        super().__init__(upgrade_to_float_no_complex, name=f"{'gammainc' if by[0] == 'k' else 'betainc'}_{by}")
        self.by, self.nin = by, 2 + int(by[0] != "k")
        self.nfunc_spec = (f"{scalars.__name__}.{self.name}", self.nin, 1)

    @property
    def on_arrays(self) -> Callable[..., Array]:
        """The function of arrays that broadcast."""
        return getattr(scalars, self.name)

    def impl(self, *inputs: float) -> Array:
        """Return the value of one element."""
        return self.on_arrays(*inputs)

    def pullback(self, inputs: list[Variable], outputs: list[Variable], grads: list[Variable]) -> list[Variable]:
        """Return the derivatives by parameters, and by x, where these are second ones."""
        if len(self.by) == _HIGHEST_ORDER:
            return [
                grad_not_implemented(self, k, i, "It is a second derivative already, and there are no third ones")
                for k, i in enumerate(inputs)
            ]
        return [grads[0] * slope for slope in _slopes(self.name, inputs)]


def _slopes(name: str, inputs: Sequence[Variable]) -> list[Variable]:
    """Return the derivatives of an incomplete function by its arguments, by the rules of programs."""
    writer = Writer(len(inputs))
    slopes: Any = OPERATIONS[name].slopes
    program = writer.written(slopes(writer.call(name, *writer.inputs), *writer.inputs))
    values = [*inputs, *map(ps.constant, program.constants)]
    for call in program.calls:
        values.append(
            (_SCALARS.get(call.name) or ByParameters(call.name.split("_")[1]))(*[values[k] for k in call.read])
        )
    return [values[k] for k in program.outputs]


#: What the rules are made of, beside further derivatives.
_SCALARS = {
    "add": ps.add, "sub": ps.sub, "mul": ps.mul, "neg": ps.neg, "exp": ps.exp, "log": ps.log, "log1p": ps.log1p,
    "gammaln": gammaln, "psi": psi,
}  # fmt: skip


class _Smooth:
    """The derivatives of an incomplete function, in the place of PyTensor's."""

    def pullback(self, inputs: list[Variable], outputs: list[Variable], grads: list[Variable]) -> list[Variable]:
        """Return the derivatives by parameters, and by x."""
        return [grads[0] * slope for slope in _slopes(NAMES[type(self)], inputs)]


class SmoothBetaInc(_Smooth, BetaInc):
    """I_x(a, b)."""


class SmoothGammaInc(_Smooth, GammaInc):
    """P(k, x)."""


class SmoothGammaIncC(_Smooth, GammaIncC):
    """Q(k, x) = 1 - P(k, x)."""


_SMOOTH: dict[type, type] = {BetaInc: SmoothBetaInc, GammaInc: SmoothGammaInc, GammaIncC: SmoothGammaIncC}


@node_rewriter([Elemwise])  # type: ignore[untyped-decorator]
def _smooth(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Put ours in the place of PyTensor's functions."""
    scalar_op = node.op.scalar_op
    kind = _SMOOTH.get(type(scalar_op))
    if kind is None:
        return None
    return list(Elemwise(kind(scalar_op.output_types_preference, name=scalar_op.name))(*node.inputs, return_list=True))


_all_smooth = dfs_rewriter(_smooth)


def with_derivatives(outputs: list[Variable]) -> list[Variable]:
    """Replace incomplete beta and gamma functions by those that have two derivatives on arrays."""
    nodes = (var.owner for var in ancestors(outputs) if var.owner is not None)
    if not any(isinstance(node.op, Elemwise) and type(node.op.scalar_op) in _SMOOTH for node in nodes):
        return outputs
    return rewritten(outputs, _all_smooth)


def is_tail(node: Apply) -> bool:
    """Tell whether a node evaluates derivatives by parameters."""
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ByParameters)


# --- programs from PyTensor's graphs of operations element by element ---

#: Names in `rows.programs.OPERATIONS` of what has one meaning, whatever the types of their arguments.
NAMES: dict[type, str] = {
    ps.Sub: "sub", ps.TrueDiv: "div", ps.Neg: "neg", ps.Sqr: "sqr", ps.Sqrt: "sqrt", ps.Reciprocal: "reciprocal",
    ps.Abs: "abs", ps.Pow: "pow", ps.Mod: "mod", ps.IntDiv: "floor_divide",
    ps.Exp: "exp", ps.Exp2: "exp2", ps.Expm1: "expm1", ps.Log: "log", ps.Log2: "log2", ps.Log10: "log10",
    ps.Log1p: "log1p", psm.Log1mexp: "log1mexp", psm.Softplus: "softplus", psm.Sigmoid: "sigmoid",
    ScalarLogAddExp: "logaddexp",
    ps.Sin: "sin", ps.Cos: "cos", ps.Tan: "tan", ps.ArcSin: "arcsin", ps.ArcCos: "arccos", ps.ArcTan: "arctan",
    ps.ArcTan2: "arctan2", ps.Sinh: "sinh", ps.Cosh: "cosh", ps.Tanh: "tanh", ps.ArcSinh: "arcsinh",
    ps.ArcCosh: "arccosh", ps.ArcTanh: "arctanh",
    psm.Gamma: "gamma", psm.GammaLn: "gammaln", psm.Psi: "psi", psm.TriGamma: "trigamma", psm.Erf: "erf",
    psm.Erfc: "erfc", psm.Erfcx: "erfcx", psm.Erfinv: "erfinv", psm.Erfcinv: "erfcinv", psm.Owens_t: "owens_t",
    psm.I0: "i0", psm.I1: "i1", psm.J0: "j0", psm.J1: "j1", psm.Jv: "jv", psm.Ive: "ive", psm.Kve: "kve",
    psm.GammaInc: "gammainc", SmoothGammaInc: "gammainc", psm.GammaIncC: "gammaincc",
    SmoothGammaIncC: "gammaincc", psm.BetaInc: "betainc", SmoothBetaInc: "betainc",
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


def read(
    inputs: Sequence[Variable], outputs: Sequence[Variable], early: Sequence[Variable] = ()
) -> tuple[Writer, list[Written]]:
    """Write a graph as a program."""
    conditions = [k for k, var in enumerate(inputs) if var.type.dtype == "bool"]
    reader = _Reader(Writer(len(inputs), conditions), inputs, set(early))
    return reader.writer, reader.of(list(outputs))


def program_of(inputs: Sequence[Variable], outputs: Sequence[Variable], early: Sequence[Variable] = ()) -> RowProgram:
    """Return a graph as a program; see `read`."""
    writer, values = read(inputs, outputs, early)
    return writer.written(values)


class _Reader:
    def __init__(self, writer: Writer, inputs: Sequence[Variable], early: set[Variable]) -> None:
        self.writer = writer
        self._values: dict[Variable, Written] = dict(zip(inputs, writer.inputs, strict=True))
        self._is_late = {value.at for var, value in self._values.items() if var not in early}
        self._ranks: dict[int, bool] = {}

    def of(self, outputs: list[Variable]) -> list[Written]:
        """Return what outputs are."""
        for node in toposort(outputs, blockers=list(self._values)):
            self._node(node)
        return [self._value(out) for out in outputs]

    def _value(self, var: Variable) -> Written:
        if var not in self._values:
            if not isinstance(var, Constant) or np.size(var.data) != 1:
                raise CannotFollow(f"{var} is not one number")
            self._values[var] = self.writer.constant(float(np.reshape(var.data, ())))
        return self._values[var]

    def _node(self, node: Apply) -> None:
        op, first = node.op, node.outputs[0]
        if first in self._values:
            return
        if isinstance(op, Elemwise):
            args = [self._value(i) for i in node.inputs]
            found = self._scalar(op.scalar_op, args, [i.type.dtype for i in node.inputs])
            self._values.update(zip(node.outputs, found, strict=True))
        elif isinstance(op, LogAddExp) and len(node.inputs) == 2:
            self._values[first] = self.writer.call("logaddexp", *map(self._value, node.inputs))
        elif isinstance(op, OpFromGraph):
            outputs = op.fgraph.bind(dict(zip(op.fgraph.inputs, node.inputs, strict=True)))
            self._values.update(zip(node.outputs, self.of(outputs), strict=True))
        elif isinstance(op, DimShuffle) and (op.input_ndim == 0 or op.new_order == tuple(range(op.input_ndim))):
            self._values[first] = self._value(node.inputs[0])
        else:
            raise CannotFollow(f"{op} is no operation element by element")

    def _scalar(self, op: ps.ScalarOp, args: list[Written], dtypes: list[str]) -> list[Written]:
        kind, call = type(op), self.writer.call
        if isinstance(op, ps.Composite):
            known: dict[Variable, Written] = dict(zip(op.fgraph.inputs, args, strict=True))

            def at(var: Variable) -> Written:
                return self.writer.constant(float(var.data)) if isinstance(var, Constant) else known[var]

            for node in op.fgraph.toposort():
                found = self._scalar(node.op, [at(i) for i in node.inputs], [i.type.dtype for i in node.inputs])
                known.update(zip(node.outputs, found, strict=True))
            return [at(out) for out in op.fgraph.outputs]
        if kind in FOLDED:
            return [reduce(lambda x, y: call(FOLDED[kind], x, y), sorted(args, key=self._is_of_late))]
        if kind in LOGICAL:
            if any(dtype != "bool" for dtype in dtypes):
                raise CannotFollow(f"{op} is of bits")
            return [call(LOGICAL[kind], *args)]
        if kind is ps.Cast:
            return [self._cast(op.o_type.dtype, dtypes[0], args[0])]
        if kind in (ps.Identity, ps.Second):
            return [args[-1]]
        if kind is psm.PolyGamma:
            return [self._polygamma(*args)]
        if isinstance(op, ByParameters):
            return [call(op.name, *args)]
        if kind not in NAMES:
            raise CannotFollow(f"{op} is not known")
        return [call(NAMES[kind], *args)]

    def _cast(self, to: str, dtype: str, value: Written) -> Written:
        if to == "bool" and dtype != "bool":
            return value.to("ne", 0.0)
        return value.to("trunc") if to.startswith(("int", "uint")) and dtype.startswith("float") else value

    def _polygamma(self, order: Written, x: Written) -> Written:
        names = {0.0: "psi", 1.0: "trigamma", 2.0: "polygamma 2"}
        if order.number not in names:
            raise CannotFollow("a polygamma function of higher order")
        return x.to(names[order.number])

    def _is_of_late(self, value: Written) -> bool:
        if value.at not in self._ranks:
            self._ranks[value.at] = value.at in self._is_late or any(self._is_of_late(part) for part in value.args)
        return self._ranks[value.at]
