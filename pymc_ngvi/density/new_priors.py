"""Other priors for free variables of a model: what changes in log p, and the model that has them."""

import contextlib
import functools

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.distributions.continuous import BoundedContinuous, CircularContinuous, PositiveContinuous, UnitContinuous
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.transforms import ChainedTransform, _default_transform
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.transforms import Transform
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph
from pymc.pytensorf import replace_vars_in_graphs, rvs_in_graph, toposort_replace
from pytensor import shared
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.xtensor.type import XTensorType
from pytensor.xtensor.vectorization import XRV

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.normalised import copy_marks, unnormalised_prior
from pymc_ngvi.density.terms import TermSums, log_densities
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout

#: Stands for an infinite unconstrained value: where the exponential of a double has its limits.
_FAR = 800.0
#: What tells the supports of distributions of `pymc.dims`.
_KINDS = (PositiveContinuous, UnitContinuous, CircularContinuous, BoundedContinuous)
_EXAMPLE = "with_prior(sd=pm.HalfNormal.dist(2.0))"


@dataclass(frozen=True, eq=False)
class NewPriors:
    """Other priors, checked to have the support and the shape of those that a model has."""

    model: pm.Model
    #: Of the fit.
    layout: Layout
    #: Distributions by the name of the free variable. Their parameters may be variables of the model.
    new: Mapping[str, Variable]

    @classmethod
    def of(cls, model: pm.Model, layout: Layout, priors: Mapping[str, Any]) -> "NewPriors":
        """Check what was given."""
        if not priors:
            raise ValueError(f"Name at least one free variable, and its new prior: {_EXAMPLE}.")
        _check_names(model, layout, priors)
        with without_c(model):
            fitting = {name: _fitting(model[name], prior) for name, prior in priors.items()}
        return cls(model, layout, {name: _copied(prior) for name, prior in fitting.items()})

    @property
    def names(self) -> list[str]:
        """The variables that get another prior."""
        return list(self.new)

    def log_ratio(self, theta: Array) -> Array:
        """Return log p under the new priors minus log p under the old ones, (n_draws,), at draws (n_draws, n_dim)."""
        return TermSums(self.model, self.layout, self._differences)(theta)

    def _differences(self) -> list[Variable]:
        """Return the change of log p by variable, as functions of the value variables: Jacobians cancel."""
        model, rvs, new = self.model, [self.model[name] for name in self.names], list(self.new.values())
        values = [rv.type() for rv in rvs]  # on the constrained scale
        of_new = transformed_conditional_logp(
            new,
            rvs_to_values={**model.rvs_to_values, **dict(zip(new, values, strict=True))},
            rvs_to_transforms={**model.rvs_to_transforms, **dict.fromkeys(new)},
            jacobian=False,
        )
        constrained = dict(zip(values, model.replace_rvs_by_values(rvs), strict=True))
        of_new = graph_replace(of_new, constrained, strict=False)
        of_old = log_densities(model, self.names)
        return [_values(a).sum() - _values(b).sum() for a, b in zip(of_new, of_old, strict=True)]

    @property
    def improper(self) -> list[str]:
        """Why marginal likelihoods can't be compared, a clause for each prior that is improper, new or old."""
        transforms = self.model.rvs_to_transforms
        pairs = [(name, var) for name, new in self.new.items() for var in (new, self.model[name])]
        found = [unnormalised_prior(name, var.owner.op, transforms[self.model[name]]) for name, var in pairs]
        # As of PyMC 6.4, their logarithm of the normalising constant has the wrong sign.
        of_lkj = [name for name, var in self.new.items() if "LKJ" in type(var.owner.op).__name__]
        found += [f"PyMC's density of the LKJ prior of {name!r} does not integrate to 1" for name in of_lkj]
        return [reason for reason in dict.fromkeys(found) if reason]

    @functools.cached_property
    def changed_model(self) -> pm.Model:
        """The model with the new priors: a copy, whose data are copies, too."""
        with without_c(self.model), _without_initial_values(self.model) as initial_values:
            fgraph, memo = fgraph_from_model(self.model)
            priors = replace_vars_in_graphs(list(self.new.values()), replacements=memo)
            pairs = []
            for name, prior in zip(self.names, priors, strict=True):
                old = memo[self.model[name]]
                pairs.append((old, _with_prior(old, self.model[name], prior)))
            toposort_replace(fgraph, pairs)
            changed: pm.Model = model_from_fgraph(fgraph, mutate_fgraph=True)
        changed.check_bounds = self.model.check_bounds
        for name, value in initial_values.items():
            changed.set_initval(changed[name], value)
        place = {name: number for number, name in enumerate(self.model.named_vars)}
        for variables in (changed.free_RVs, changed.observed_RVs, changed.deterministics, changed.potentials):
            variables.sort(key=lambda var: place[var.name])  # the graph has them in another order
        copy_marks(self.model, changed)
        return changed


@contextlib.contextmanager
def _without_initial_values(model: pm.Model) -> Iterator[dict[str, Any]]:
    """Take initial values off a model, which PyMC does not copy with them, and give them back; yield those that differ.

    Graphs among them stay behind: they are of the variables of this model.
    """
    kept = dict(model.rvs_to_initial_values)
    try:
        model.rvs_to_initial_values.update(dict.fromkeys(kept))
        yield {rv.name: value for rv, value in kept.items() if value is not None and not isinstance(value, Variable)}
    finally:
        model.rvs_to_initial_values.update(kept)


def _with_prior(old: Variable, old_rv: Variable, prior: Variable) -> Variable:
    """Return a free variable of the graph of a model with another prior, and the default transform of that."""
    op, [_, value, *dims] = copy(old.owner.op), old.owner.inputs  # which PyMC 6.3 has among them
    rv = old.owner.inputs[0].type.filter_variable(prior)
    rv.name = old_rv.name
    transform = _transform_of(old_rv, rv, op.transform)
    if transform is not op.transform:
        op.transform = transform
        value = (rv if transform is None else transform.forward(rv, *rv.owner.inputs)).type()
        value.name = rv.name if transform is None else f"{rv.name}_{transform.name}__"
    return op(rv, value, *dims)


def _transform_of(old: Variable, new: Variable, transform: Transform | None) -> Transform | None:
    """Return the transform of a variable with another prior: the default one for it, unless the user chose another."""
    if isinstance(old.type, XTensorType):
        return transform
    was, default = (_default_transform(rv.owner.op, rv) for rv in (old, new))
    if isinstance(transform, ChainedTransform) and type(transform.transform_list[0]) is type(was):
        return ChainedTransform([default, *transform.transform_list[1:]])
    return default if type(transform) is type(was) and default is not None else transform


def _check_names(model: pm.Model, layout: Layout, priors: Mapping[str, Any]) -> None:
    free = [v.name for v in layout.variables]
    for name in priors:
        if name in free:
            continue
        if name in model.named_vars:
            what = "a Deterministic" if model[name] in model.deterministics else "no free variable of the fit"
            why = f"{name!r} is {what}, and has no prior to replace. Free variables: {', '.join(map(repr, free))}."
        else:
            why = f"The model has no free variable {name!r}: {suggestion(name, free)}"
        raise ValueError(why)


def _copied(prior: Variable) -> Variable:
    """Return a distribution with random numbers of its own: one may be given for several variables."""
    node = prior.owner
    inputs = [shared(np.random.default_rng()) if isinstance(i.type, RandomType) else i for i in node.inputs]
    return node.clone_with_new_inputs(inputs).outputs[prior.index]


def _fitting(rv: Variable, prior: Any) -> Variable:
    """Return a prior for a variable, of its shape; raise where it does not fit."""
    op = getattr(getattr(prior, "owner", None), "op", None)
    if not isinstance(op, RandomVariable | SymbolicRandomVariable | XRV):
        packed = " Of an LKJCholeskyCov, give that of compute_corr=False." if isinstance(prior, tuple) else ""
        raise TypeError(
            f"The new prior of {rv.name!r} should be a distribution, such as pm.Normal.dist(0, 1); got "
            f"{shortened(prior)}.{packed}"
        )
    if isinstance(rv.type, XTensorType) != isinstance(prior.type, XTensorType):
        kind = "pymc.dims" if isinstance(rv.type, XTensorType) else "PyMC"
        raise TypeError(f"The new prior of {rv.name!r} should be a distribution of {kind}, as the old one is.")
    if np.dtype(prior.type.dtype).kind != "f":
        raise ValueError(f"The new prior of {rv.name!r} is discrete, and {rv.name!r} is continuous.")
    if isinstance(rv.type, XTensorType):
        _check_named_dims(rv, prior)
        return prior
    prior = _of_shape(rv, prior)
    _check_support(rv, prior)
    return prior


def _of_shape(rv: Variable, prior: Variable) -> Variable:
    """Return a prior of the shape of a variable: one for each of its elements where it is that of one."""
    wanted, given = _shape(rv), _shape(prior)
    if wanted == given:
        return prior
    n_own = prior.owner.op.ndim_supp
    own, of_batch = given[len(given) - n_own :], given[: len(given) - n_own]
    batch = wanted[: len(wanted) - n_own]
    fits = len(given) <= len(wanted) and own == wanted[len(batch) :] and _broadcasts(of_batch, batch)
    if not fits:
        raise ValueError(f"The new prior of {rv.name!r} has shape {given}, and {rv.name!r} has shape {wanted}.")
    return change_dist_size(prior, batch)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


def _shape(rv: Variable) -> tuple[int, ...]:
    if None not in rv.type.shape:
        return tuple(rv.type.shape)
    return tuple(int(n) for n in rv.shape.eval(mode="FAST_COMPILE"))


def _check_named_dims(rv: Variable, prior: Variable) -> None:
    """Raise ValueError where a distribution of `pymc.dims` is not on the values of another, or has other dims."""
    if set(rv.type.dims) != set(prior.type.dims):
        raise ValueError(
            f"The new prior of {rv.name!r} has dims {prior.type.dims}, and {rv.name!r} has {rv.type.dims}: "
            "dist(..., dim_lengths={...}) gives it some."
        )
    of = [[kind for kind in _KINDS if isinstance(var.owner.op.core_op, kind)] for var in (rv, prior)]
    if of[0] != of[1] or BoundedContinuous in of[0]:
        raise ValueError(
            f"The new prior of {rv.name!r} may be on other values than the old one. Fit a model with this prior."
        )


# --- supports ---


def _check_support(rv: Variable, prior: Variable) -> None:
    """Raise ValueError where two distributions are not on the same values."""
    old, new = (_default_transform(of.owner.op, of) for of in (rv, prior))
    n_own = prior.owner.op.ndim_supp
    if max(n_own, rv.owner.op.ndim_supp) > 0:
        if type(old) is not type(new):
            raise ValueError(
                f"The new prior of {rv.name!r} is on other values than the old one: simplices, ordered vectors, "
                "Cholesky factors and vectors of real numbers do not go together. Fit a model with this prior."
            )
        return
    limits = [_limits(of, transform) for of, transform in ((rv, old), (prior, new))]
    if any(found is None for found in limits):
        raise ValueError(
            f"The prior of {rv.name!r} has limits that depend on other variables: weights can't tell what another one "
            "would change. Fit a model with this prior."
        )
    close = [np.isclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*limits, strict=True)]
    if not all(map(np.all, close)):
        was, is_ = (_in_words(found) for found in limits)
        raise ValueError(
            f"The new prior of {rv.name!r} is on {is_}, and the old one on {was}: draws of the one don't cover the "
            "other. Give a prior of the same support (pm.Truncated cuts one off), or fit a model with this one."
        )


type Limits = tuple[AnyArray, AnyArray]


def _limits(rv: Variable, transform: Any) -> Limits | None:
    """Return the smallest and the largest value of a variable; None where these depend on other variables."""
    if transform is None:
        return np.array(-np.inf), np.array(np.inf)
    ends = [transform.backward(pt.constant(end), *rv.owner.inputs) for end in (-_FAR, _FAR)]
    if rvs_in_graph(ends):
        return None
    with np.errstate(all="ignore"):
        low, high = (np.asarray(end.eval(mode="FAST_COMPILE")) for end in ends)
    return np.minimum(low, high), np.where(np.maximum(low, high) >= _FAR, np.inf, np.maximum(low, high))


def _in_words(limits: Any) -> str:
    low, high = (np.unique(end) for end in limits)
    if len(low) > 1 or len(high) > 1:
        return "several intervals"
    if np.isinf(low[0]) and np.isinf(high[0]):
        return "all real numbers"
    return f"({low[0]:.4g}, {high[0]:.4g})"


def _values(term: Variable) -> Variable:
    return pt.as_tensor(term, allow_xtensor_conversion=True)
