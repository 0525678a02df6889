"""Incomplete beta and gamma functions with two derivatives by their parameters, evaluated on whole arrays.

They are the distribution functions of beta, binomial, gamma, Student's t and negative binomial variables, and stand in
the likelihoods of censored, truncated and hurdle models. PyTensor's first derivatives are loops in Python for each
element, and there are no second ones.
"""

from collections.abc import Callable

import pytensor.scalar as ps

from pytensor.gradient import grad_not_implemented
from pytensor.graph import Apply, FunctionGraph, Variable, ancestors
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.scalar import BetaInc, GammaInc, GammaIncC, gammaln, psi, upgrade_to_float_no_complex
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core import tails
from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs.rewrites import rewritten

_HIGHEST_ORDER = 2


class ByParameters(ps.ScalarOp):
    """A derivative of the incomplete beta function I_x(a, b), or the gamma function P(k, x), by parameters."""

    def __init__(self, by: str) -> None:
        self.parameters = "k" if by[0] == "k" else "ab"
        super().__init__(upgrade_to_float_no_complex, name=f"{'gammainc' if by[0] == 'k' else 'betainc'}_{by}")
        self.by, self.nin = by, len(self.parameters) + 1
        self.nfunc_spec = (f"{tails.__name__}.{self.name}", self.nin, 1)

    def __eq__(self, other: object) -> bool:
        """Compare what it is a derivative of, and by what."""
        return type(self) is type(other) and self.by == other.by

    def __hash__(self) -> int:
        """Return that of what is compared."""
        return hash((type(self), self.by))

    @property
    def on_arrays(self) -> Callable[..., Array]:
        """The function of arrays that broadcast."""
        return getattr(tails, self.name)

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
        density, scores = _density(*inputs)
        by_parameters = [ByParameters("".join(sorted(self.by + p)))(*inputs) for p in self.parameters]
        by_x = density * scores[self.parameters.index(self.by)]
        return [grads[0] * slope for slope in (*by_parameters, by_x)]


def _density(*inputs: Variable) -> tuple[Variable, list[Variable]]:
    """Return the derivative by x, and those of its logarithm by parameters."""
    *parameters, x = inputs
    if len(parameters) == 1:
        k = parameters[0]
        return ps.exp((k - 1) * ps.log(x) - x - gammaln(k)), [ps.log(x) - psi(k)]
    a, b = parameters
    log_density = (a - 1) * ps.log(x) + (b - 1) * ps.log1p(-x) - gammaln(a) - gammaln(b) + gammaln(a + b)
    return ps.exp(log_density), [ps.log(x) - psi(a) + psi(a + b), ps.log1p(-x) - psi(b) + psi(a + b)]


class _Smooth:
    """The derivatives of an incomplete function, in the place of PyTensor's."""

    sign = 1.0

    def pullback(self, inputs: list[Variable], outputs: list[Variable], grads: list[Variable]) -> list[Variable]:
        """Return the derivatives by parameters, and by x."""
        slopes = [ByParameters(p)(*inputs) for p in ("ab" if len(inputs) > 2 else "k")]
        return [grads[0] * self.sign * slope for slope in (*slopes, _density(*inputs)[0])]


class SmoothBetaInc(_Smooth, BetaInc):
    """I_x(a, b)."""


class SmoothGammaInc(_Smooth, GammaInc):
    """P(k, x)."""


class SmoothGammaIncC(_Smooth, GammaIncC):
    """Q(k, x) = 1 - P(k, x)."""

    sign = -1.0


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


def has_parameters(outputs: list[Variable], theta: Variable) -> bool:
    """Tell whether there are incomplete functions, with derivatives by parameters, which depend on theta."""
    found = [var.owner for var in ancestors(outputs) if var.owner is not None and isinstance(var.owner.op, Elemwise)]
    parameters = [i for node in found if isinstance(node.op.scalar_op, _Smooth) for i in node.inputs[:-1]]
    return theta in ancestors(parameters)


def is_tail(node: Apply) -> bool:
    """Tell whether a node evaluates derivatives by parameters."""
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ByParameters)
