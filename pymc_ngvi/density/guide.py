"""Guides of group effects other than log p itself: the prior alone, and a quadratic one from the data [1]_.

In the second, each log likelihood of an observation is replaced by its Taylor polynomial of the second order in the
linear predictor eta, about an estimate that does not depend on the parameters. Where the effects of a group have a
Gaussian prior and enter eta linearly, the guide is quadratic in them: its mode takes one step of Newton's method.

References
----------
.. [1] L. S. L. Tan (2021). Use of model reparametrization to improve variational Bayes. Journal of the Royal
   Statistical Society, Series B, 83. https://doi.org/10.1111/rssb.12399
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Variable
from pytensor.scalar import Cast, Exp, Identity, Sigmoid
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.basic import BernoulliRV, NormalRV, PoissonRV
from pytensor.xtensor.shape import Transpose
from pytensor.xtensor.type import XTensorType
from pytensor.xtensor.vectorization import XRV, XElemwise
from scipy.special import expit, logit

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.reading.factors import logp_of

_INSTEAD = "Use reparam='rvb2', which works with any likelihood."


@dataclass(frozen=True)
class _Likelihood:
    """A distribution with its canonical link."""

    name: str
    #: The inverse link; None for the identity.
    link: type | None
    #: How a model has to state it.
    written: str
    #: From data, and the block of each observation, to eta; None where no expansion is needed.
    estimate: Callable[[Array, NDArray[np.intp]], Array] | None = None
    #: From data and eta to the first and second derivative of the log likelihood.
    derivatives: Callable[[Array, Array], tuple[Array, Array]] | None = None


def quadratic_guide(density: LogDensity, structure: ArrowStructure) -> Variable:
    """Return the guide as a function of the value variables of the model."""
    if not structure.n_local:
        raise ValueError(
            "reparam='rvb1' standardises local coordinates, such as the effects of groups that are independent given "
            "the others; this model has none. Fit it without reparam."
        )
    model = density.model
    if not model.observed_RVs:
        raise ValueError(
            f"The model has no observed variables, and reparam='rvb1' takes its guide from data. {_INSTEAD}"
        )
    found = [_recognised(rv) for rv in model.observed_RVs]
    expanded = [(rv, *f) for rv, f in zip(model.observed_RVs, found, strict=True) if f[0].estimate is not None]
    by_expansion = {rv for rv, _, _ in expanded}
    rest = logp_of([factor for factor in density.graphs.factors if factor.variable not in by_expansion])
    with without_c():
        etas = model.replace_rvs_by_values([eta for _, _, eta in expanded])
        data = [_data(model.rvs_to_values[rv]) for rv, _, _ in expanded]
        groups = _groups(density, structure, density.graphs.on_flat_vector(etas), [y.shape for y in data])
    terms = [
        _expansion(kind, eta, y, group)
        for (_, kind, _), eta, y, group in zip(expanded, etas, data, groups, strict=True)
    ]
    return pt.add(rest, *terms) if terms else rest


# --- what a model says ------------------------------------------------------------------------------------------------


def _recognised(rv: Variable) -> tuple[_Likelihood, Variable]:
    """Return the kind of an observed variable, and its linear predictor in terms of random variables."""
    drawn = rv.owner
    while isinstance(drawn.op, Transpose):  # dims in another order than those of the parameters
        drawn = drawn.inputs[0].owner
    op = drawn.op
    distribution = op.core_op if isinstance(op, XRV) else op
    kind = next((kind for op_class, kind in _KINDS.items() if isinstance(distribution, op_class)), None)
    if kind is None:
        name = getattr(op, "_print_name", None)
        kind_of = name[0] if name else type(op).__name__
        raise ValueError(
            f"The observed variable {rv.name!r} is {kind_of}; reparam='rvb1' knows Poisson, Bernoulli and Normal ones. "
            f"{_INSTEAD}"
        )
    parameter = _unwrapped(op.dist_params(drawn)[0])
    if kind.link is None:
        return kind, _in_order(parameter, rv)
    node = parameter.owner
    if node is None or not isinstance(node.op, Elemwise | XElemwise) or not isinstance(node.op.scalar_op, kind.link):
        raise ValueError(
            f"The observed variable {rv.name!r} is {kind.name}, but not with its canonical link, {kind.written}; "
            f"reparam='rvb1' has no expansion for another one. {_INSTEAD}"
        )
    return kind, _in_order(node.inputs[0], rv)


def _in_order(parameter: Variable, rv: Variable) -> Variable:
    """Return a parameter with named dimensions as a tensor whose axes are those of the variable."""
    if not isinstance(parameter.type, XTensorType):
        return parameter
    missing = [dim for dim in rv.type.dims if dim not in parameter.type.dims]
    return parameter.expand_dims(missing).transpose(*rv.type.dims).values


def _unwrapped(variable: Variable) -> Variable:
    """Return a parameter without casts and the copies that Deterministics are."""
    while (node := variable.owner) is not None:
        copies = isinstance(node.op, Elemwise | XElemwise) and isinstance(node.op.scalar_op, Identity | Cast)
        if not copies and not isinstance(node.op, ViewOp):
            break
        variable = node.inputs[0]
    return variable


def _data(value: Variable) -> Array:
    """Return the data of an observed variable as they are now."""
    return np.asarray(pytensor.function([], value, mode=quick_mode())(), dtype=np.float64)


def _groups(
    density: LogDensity, structure: ArrowStructure, etas: list[Variable], shapes: list[tuple[int, ...]]
) -> list[NDArray[np.intp]]:
    """Return the block that each element of some predictors depends on, -1 for none.

    Blocks are numbered in binary, and one evaluation moves all blocks whose number has a certain digit.
    """
    if not etas:
        return []
    etas = [pt.broadcast_to(eta, shape) for eta, shape in zip(etas, shapes, strict=True)]
    function = pytensor.function([density.graphs.theta], etas, mode=quick_mode(), on_unused_input="ignore")
    rng = np.random.default_rng(0)
    local = structure.order[: structure.n_local]
    block = np.repeat(np.arange(len(structure.sizes)), structure.sizes) + 1
    point = density.initial_point() + 0.1 * rng.standard_normal(structure.n_dim)
    before = function(point)
    numbers = [np.zeros(shape, dtype=np.intp) for shape in shapes]
    for digit in range(int(block.max()).bit_length()):
        moved = point.copy()
        among = local[(block >> digit) & 1 == 1]
        moved[among] += 0.5 + rng.random(len(among))
        for number, a, b in zip(numbers, before, function(moved), strict=True):
            number += (np.abs(b - a) > 1e-9 * (1.0 + np.abs(a))).astype(np.intp) << digit
    return [number - 1 for number in numbers]


# --- expansions -------------------------------------------------------------------------------------------------------


def _expansion(kind: _Likelihood, eta: Variable, y: Array, group: NDArray[np.intp]) -> Variable:
    """Return the second-order expansion of a log likelihood, without its constant."""
    assert kind.estimate is not None
    assert kind.derivatives is not None
    centre = kind.estimate(y, group)
    first, second = kind.derivatives(y, centre)
    away = eta - centre
    return (first * away + 0.5 * second * away**2).sum()


def _group_means(y: Array, group: NDArray[np.intp], weight: float) -> Array:
    """Return for each observation the mean of its block, shrunk towards the mean of all by ``weight`` observations."""
    flat, of = y.ravel(), group.ravel() + 1
    counts, sums = np.bincount(of), np.bincount(of, weights=flat)
    means = (sums + weight * flat.mean()) / (counts + weight)
    return means[of].reshape(y.shape)


def _bernoulli_estimate(y: Array, group: NDArray[np.intp]) -> Array:
    mean = _group_means(y, group, 1.0)
    return logit(np.clip(mean, 0.02, 0.98))


def _poisson_estimate(y: Array, group: NDArray[np.intp]) -> Array:
    mean = _group_means(y, group, 1.0)
    return np.log(np.maximum(0.5 * (y + mean), 0.05))


def _bernoulli_derivatives(y: Array, eta: Array) -> tuple[Array, Array]:
    p = expit(eta)
    return y - p, -p * (1.0 - p)


def _poisson_derivatives(y: Array, eta: Array) -> tuple[Array, Array]:
    mu = np.exp(eta)
    return y - mu, -mu


_KINDS: dict[type, _Likelihood] = {
    BernoulliRV: _Likelihood("Bernoulli", Sigmoid, "logit_p=eta", _bernoulli_estimate, _bernoulli_derivatives),
    PoissonRV: _Likelihood("Poisson", Exp, "mu=exp(eta)", _poisson_estimate, _poisson_derivatives),
    NormalRV: _Likelihood("Normal", None, "mu=eta"),
}
