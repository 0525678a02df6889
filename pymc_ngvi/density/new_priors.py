"""Other priors for free variables of a model: what changes in log p, and the model that has them."""

import functools

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.distributions.continuous import (
    BoundedContinuous,
    CircularContinuous,
    FlatRV,
    HalfFlatRV,
    PositiveContinuous,
    UnitContinuous,
)
from pymc.distributions.custom import CustomDistRV
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.distributions.multivariate import ICARRV, LKJCorrRV
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.transforms import ChainedTransform, Ordered
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.transforms import Transform
from pymc.pytensorf import replace_vars_in_graphs, rvs_in_graph
from pytensor import shared
from pytensor.graph import Constant, Op, Variable, graph_replace
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.xtensor.type import XTensorType
from pytensor.xtensor.vectorization import XRV
from scipy.special import betaln

from pymc_ngvi.core import linalg
from pymc_ngvi.core.messages import percent, shortened, suggestion
from pymc_ngvi.core.types import AnyArray, Array, Indices
from pymc_ngvi.density.constrain import log_densities, term_sums
from pymc_ngvi.density.info import broadcasts, with_replacements
from pymc_ngvi.density.over_draws import OnDraws, drawn_anew
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.private import LKJCholeskyCovRV, default_transform
from pymc_ngvi.reading.predictors import ROUNDING

# --- which coordinates have no proper prior: a posterior can be improper only through these ---


def flat_coordinates(model: pm.Model, layout: Layout) -> Indices:
    """Return the coordinates of ``pm.Flat`` and ``pm.HalfFlat``."""
    found = [np.arange(v.where.start, v.where.stop) for v in layout.variables if _is(model, v.name, FlatRV, HalfFlatRV)]
    return np.concatenate(found) if found else np.empty(0, dtype=np.intp)


def has_proper_priors(model: pm.Model) -> bool:
    """Tell whether every free variable has a density that integrates to 1, so that the posterior is proper.

    What is not known to be so, Potentials and densities of the user's own, counts as improper.
    """
    names = [rv.name for rv in model.free_RVs]
    return not (model.potentials or any(_is(model, name, FlatRV, HalfFlatRV, CustomDistRV, ICARRV) for name in names))


def _is(model: pm.Model, name: str, *kinds: type) -> bool:
    return isinstance(getattr(model[name].owner, "op", None), kinds)


#: What marks a term that the user says is normalised.
_MARK = "pymc_ngvi_normalised"


def normalised(term: Variable) -> Variable:
    """Declare that a Potential, or a variable with an ordering transform, leaves the prior a density.

    Its exponential, times the rest of the prior, has to integrate to 1 over the parameters; only then does
    `NGVIApproximation.log_marginal_likelihood` mean anything.

    Parameters
    ----------
    term : pytensor variable
        What ``pm.Potential`` or a distribution has returned.

    Returns
    -------
    pytensor variable
        The same.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x")
    ...     _ = pymc_ngvi.normalised(pm.Potential("shift", 0.0 * x))
    """
    setattr(term.tag, _MARK, True)
    return term


def unnormalised(model: pm.Model) -> list[str]:
    """Return why exp(log p) is not the joint density of parameters and data, a clause for each term; often empty."""
    transforms = model.rvs_to_transforms
    of_priors = [
        unnormalised_prior(rv.name, rv.owner.op, transforms.get(rv))
        for rv in model.free_RVs
        if not getattr(rv.tag, _MARK, False)
    ]
    of_priors += [_unknown_constant(rv) for rv in model.free_RVs if _is_lkj(rv)]
    reasons = [reason for reason in of_priors if reason]
    for term in model.potentials:
        if not getattr(term.tag, _MARK, False):
            reasons.append(
                f"the Potential {term.name!r} may have any scale (unless it is wrapped in pymc_ngvi.normalised(...))"
            )
    return reasons


def unnormalised_prior(name: str, op: Op, transform: Transform | None) -> str:
    """Return why the prior of a variable is no density that integrates to 1, in a clause; empty where it is one."""
    if isinstance(op, FlatRV | HalfFlatRV):
        return f"the prior of {name!r} is improper"
    if isinstance(op, ICARRV):
        return f"the ICAR prior of {name!r} has no normalising constant"
    if isinstance(transform, Ordered):
        return f"the ordering of {name!r} leaves out a part of its prior that is not made up for"
    return ""


def log_excess(model: pm.Model) -> float:
    """Return the logarithm of what the prior integrates to where PyMC's constants are off, 0 where they are not.

    The constant of LKJ priors has the wrong sign in versions of PyMC: it is compared with the integral [1]_.

    References
    ----------
    .. [1] D. Lewandowski, D. Kurowicka, H. Joe (2009). Generating random correlation matrices based on vines and
       extended onion method. Journal of Multivariate Analysis 100(9). https://doi.org/10.1016/j.jmva.2009.04.008
    """
    total = 0.0
    for rv in model.free_RVs:
        if _is_lkj(rv):
            n, eta = (v.eval().item() for v in _lkj_parameters(rv))
            n_matrices = int(np.prod(rv.shape[:-2].eval())) if isinstance(rv.owner.op, LKJCorrRV) else 1
            # The log of the integral of det(R)^(eta - 1) over correlation matrices of n variables.
            k = np.arange(1, int(n))
            log_beta = betaln(eta + (n - k - 1) / 2.0, eta + (n - k - 1) / 2.0)
            integral = float(np.sum((n - k) * ((2.0 * eta - 2.0 + n - k) * np.log(2.0) + log_beta)))
            total += n_matrices * (_lkj_constant(n, eta) + integral)
    return total


@functools.cache  # PyMC compiles a function for it
def _lkj_constant(n: int, eta: float) -> float:
    return float(pm.logp(pm.LKJCorr.dist(n=n, eta=eta), np.eye(n)).eval())


def _is_lkj(rv: Variable) -> bool:
    return isinstance(rv.owner.op, LKJCorrRV | LKJCholeskyCovRV)


def _unknown_constant(rv: Variable) -> str:
    """Return why an LKJ prior has no constant that is known, in a clause; empty where it has one."""
    n, eta = _lkj_parameters(rv)
    if not isinstance(eta, Constant):
        return f"the LKJ prior of {rv.name!r} has an eta that is not constant"
    # PyMC's density there is one of Cholesky factors, without the change of volume to correlations.
    if isinstance(rv.owner.op, LKJCorrRV) and n.eval() > 2:
        return f"the density of the LKJCorr prior of {rv.name!r} is not that of correlations, in PyMC"
    return ""


def _lkj_parameters(rv: Variable) -> list[Variable]:
    """Return n and eta."""
    inputs: list[Variable] = rv.owner.inputs
    first = 2 if isinstance(rv.owner.op, LKJCorrRV) else 1
    return inputs[first : first + 2]


#: Mass where there are few draws that is little. Effective numbers of draws from the outermost inwards: few; and two by
#: which it is told what the data say beyond. Standard errors by which that may fall less steeply than it seems to.
_LITTLE, _ENDS, _N_ERRORS = 0.05, (10, 40, 120), 1.0
#: In the place of 0, where it is divided by.
_NONE = np.finfo(np.float64).tiny


def mass_missed(u: Array, x: Array, drawn: Array, log_density: Array, before: Array, weights: Array) -> float:
    """Return the part of the mass of a variable that is where it has few draws, and that their weights do not show.

    What the data say of a value is the mass of draws about it over that of the prior. Beyond all draws but a
    few it is taken to fall exponentially, on the unconstrained scale, as it does among those before them.

    Parameters
    ----------
    u, x : ndarray, shape (n,)
        Draws, unconstrained and constrained.
    drawn : ndarray, shape (n,)
        From the new prior, unconstrained.
    log_density : ndarray, shape (n,)
        Of the new prior at the draws, constrained.
    before, weights : ndarray, shape (n,)
        Of the draws, under the old prior and under the new one; they add up to 1.
    """
    missed = 0.0
    for sign in (1.0, -1.0):  # below, above
        order = np.argsort(sign * u)
        v, w, old = sign * u[order], weights[order], before[order]
        with np.errstate(invalid="ignore"):
            ends = np.minimum(np.searchsorted(np.cumsum(old) ** 2 / np.cumsum(old**2), _ENDS), len(u) - 2)
        middle, log_said, variance = np.empty(2), np.empty(2), 0.0
        for k in range(2):
            part = slice(ends[k], ends[k + 1] + 1)
            prior = abs(np.trapezoid(np.exp(log_density[order][part]), x[order][part]))
            mass = max(w[part].sum(), _NONE)
            middle[k], log_said[k] = w[part] @ v[part] / mass, np.log(mass) - np.log(max(prior, _NONE))
            variance += float(np.sum((w[part] / mass) ** 2))
        slope = (log_said[1] - log_said[0] - _N_ERRORS * np.sqrt(variance)) / max(middle[1] - middle[0], _NONE)
        out = sign * drawn < v[ends[0]]
        expected = weights[out] @ np.exp(log_said[0] + max(slope, 0.0) * (sign * drawn[out] - middle[0]))
        missed += max(float(expected - w[: ends[0]].sum()), 0.0)
    return missed / (1.0 + missed)


#: Stands for an infinite unconstrained value: where the exponential of a double has its limits, and a circle its ends.
_FAR = 255.0 * np.pi - 1e-9
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
        return term_sums(self.model, self.layout, self._differences, theta)

    def _new_terms(self) -> list[Variable]:
        """Return the new log densities by variable, on the constrained scale, in the value variables."""
        model, rvs, new = self.model, [self.model[name] for name in self.names], list(self.new.values())
        values = [rv.type() for rv in rvs]  # on the constrained scale
        of_new = transformed_conditional_logp(
            new,
            rvs_to_values={**model.rvs_to_values, **dict(zip(new, values, strict=True))},
            rvs_to_transforms={**model.rvs_to_transforms, **dict.fromkeys(new)},
            jacobian=False,
        )
        constrained = dict(zip(values, model.replace_rvs_by_values(rvs), strict=True))
        terms: list[Variable] = graph_replace(of_new, constrained, strict=False)
        return terms

    def _differences(self) -> list[Variable]:
        """Return the change of log p by variable, as functions of the value variables: Jacobians cancel."""
        of_new, of_old = (
            [pt.as_tensor(term, allow_xtensor_conversion=True).sum() for term in terms]
            for terms in (self._new_terms(), log_densities(self.model, self.names))
        )
        return [new - old for new, old in zip(of_new, of_old, strict=True)]

    def missed(self, theta: Array, before: Array, weights: Array, random_seed: int) -> list[str]:
        """Return of which variables much of the mass may be where there are few draws, in clauses.

        Elements that have one distribution together are not looked at.
        """
        transforms = self.model.rvs_to_transforms
        names = [
            name
            for name, new in self.new.items()
            if not (new.owner.op.ndim_supp or isinstance(new.type, XTensorType))
            and not unnormalised_prior(name, new.owner.op, transforms[self.model[name]])
        ]
        if not names:
            return []
        terms = dict(zip(self.names, self._new_terms(), strict=True))
        with without_c(self.model):
            known = pt.vector("known", dtype="float64", shape=(self.layout.n_dim + 1,))
            outputs = []
            for name in names:
                rv, new, transform = self.model[name], self.new[name], transforms[self.model[name]]
                drawn = new if transform is None else transform.forward(new, *rv.owner.inputs)
                outputs += [*self.model.replace_rvs_by_values([rv, drawn]), terms[name]]
            outputs = drawn_anew(graph.on_flat_vector(self.model, self.layout, outputs, known[1:]), known[0])
            function = OnDraws(self.model, known, graph.simplify(outputs, check_bounds=self.model.check_bounds))
        function.reseed(random_seed)
        try:
            made, found = iter(function(np.column_stack([np.zeros(len(theta)), theta]))), list[str]()
        except NotImplementedError:  # of a distribution that can't be drawn from
            return []
        for name in names:
            [where] = [v.where for v in self.layout.variables if v.name == name]
            x, drawn, log_density = (next(made).reshape(len(theta), -1) for _ in range(3))
            columns = zip(theta[:, where].T, x.T, drawn.T, log_density.T, strict=True)
            share = max(mass_missed(*of_one, before, weights) for of_one in columns)
            if share > _LITTLE:
                found.append(f"{percent(share)} of the mass of {name!r} may be where there are few draws, or none")
        return found

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

        def replaced(memo: Mapping[Variable, Variable]) -> list[tuple[Variable, Variable]]:
            priors = replace_vars_in_graphs(list(self.new.values()), replacements=memo)
            olds = [memo[self.model[name]] for name in self.names]
            return [
                (old, _with_prior(old, self.model[name], prior))
                for old, name, prior in zip(olds, self.names, priors, strict=True)
            ]

        changed = with_replacements(self.model, replaced)
        for term in (*self.model.free_RVs, *self.model.potentials):
            if getattr(term.tag, _MARK, False):
                normalised(changed[term.name])
        return changed


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
    was, default = (default_transform(rv.owner.op, rv) for rv in (old, new))
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
    fits = len(given) <= len(wanted) and own == wanted[len(batch) :] and broadcasts(of_batch, batch)
    if not fits:
        raise ValueError(f"The new prior of {rv.name!r} has shape {given}, and {rv.name!r} has shape {wanted}.")
    return change_dist_size(prior, batch)


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
    old, new = (default_transform(of.owner.op, of) for of in (rv, prior))
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
    close = [np.isclose(a, b, rtol=ROUNDING, atol=linalg.ROUNDING) for a, b in zip(*limits, strict=True)]
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
