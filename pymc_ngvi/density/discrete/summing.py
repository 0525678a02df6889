"""A model without its discrete free variables: which can be summed out, and why others can't."""

import importlib.util
import warnings

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pymc as pm

from pymc.distributions.transforms import Chain
from pymc.logprob.transforms import IntervalTransform
from pymc.model.fgraph import clone_model
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import walk

from pymc_ngvi.density.checks import quoted

_CURE = (
    "Write the model without them (a pm.Mixture in the place of a category, a pm.Potential with the logarithm of the "
    "sum), or use pm.sample."
)
_CAN_SUM = "Bernoulli, Categorical, DiscreteUniform and DiscreteMarkovChain"
_SUBMODEL = "this is a submodel, and the model around it is the one to fit"
_INSTALL = "pip install 'pymc-ngvi[discrete]'"
_NOT_INSTALLED = f"pymc_extras, which sums them out, is not installed: {_INSTALL}"
_OTHER_VERSION = f"the version of pymc_extras that is installed is not one that is known here: {_INSTALL}"


@dataclass(frozen=True, eq=False)
class SummedOut:
    """A model without its discrete free variables, and the one that it was made of."""

    #: The user's, which stays as it is.
    given: pm.Model
    #: The same without discrete free variables. It reads the data and the coords of the other.
    model: pm.Model
    #: The discrete variables.
    names: tuple[str, ...]
    #: Those of them on which no data depend, such as missing counts: they are left out, and drawn as predictions.
    unused: tuple[str, ...]
    #: Deterministics that depend on discrete variables.
    deterministics: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """The discrete variables, then Deterministics that depend on them."""
        return (*self.names, *self.deterministics)

    @property
    def dims(self) -> dict[str, list[str]]:
        """Dims of these, where they are named."""
        named = self.given.named_vars_to_dims
        return {name: list(named[name]) for name in self.shown if None not in (named.get(name) or (None,))}


def is_discrete(rv: Variable) -> bool:
    """Tell whether a random variable has whole numbers for values."""
    return bool(rv.dtype.startswith(("int", "uint", "bool")))


def refuse_discrete(model: pm.Model) -> None:
    """Raise ValueError for a model with discrete free variables, of which only a part is evaluated here."""
    if discrete := [rv for rv in model.free_RVs if is_discrete(rv)]:
        reason = "data in batches or shards are not summed over"
        raise ValueError(_refusal(dict.fromkeys((str(rv.name) for rv in discrete), reason)))


def summed_out(model: pm.Model) -> SummedOut | None:
    """Sum discrete free variables out of a model."""
    discrete = [rv for rv in model.free_RVs if is_discrete(rv)]
    if not discrete:
        return None
    if len(discrete) == len(model.free_RVs):
        raise ValueError(
            f"All free variables of the model ({_names(discrete)}) are discrete: method 'ngvi' fits continuous ones, "
            "and nothing is left to fit once they are summed out. Use pm.sample."
        )
    unused = _without_data(model, discrete)
    used = [rv for rv in discrete if rv not in unused]
    if model.parent is not None:
        raise ValueError(_refusal(dict.fromkeys((str(rv.name) for rv in discrete), _SUBMODEL)))
    if reasons := _reasons(model, used):
        raise ValueError(_refusal(reasons))
    reads = _reads(model.deterministics, model, discrete)
    view = _view(model, unused, reads)
    made = _marginalised(view, [str(rv.name) for rv in used])
    _share(model, made)
    order = {name: n for n, name in enumerate(model.named_vars)}
    for kind in ("free_RVs", "observed_RVs", "deterministics"):
        variables = getattr(made, kind)
        setattr(made, kind, type(variables)(sorted(variables, key=lambda var: order[var.name])))
    return SummedOut(
        model, made, tuple(str(rv.name) for rv in discrete), tuple(str(rv.name) for rv in unused),
        tuple(str(d.name) for d in model.deterministics if d in reads),
    )  # fmt: skip


def _names(variables: Iterable[Variable]) -> str:
    return quoted(str(var.name) for var in variables)


def _refusal(reasons: dict[str, str]) -> str:
    """Return the message for variables that can't be summed out, each with the reason."""
    why: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        why.setdefault(reason, []).append(name)
    said = "; ".join(f"{quoted(names)}: {reason}" for reason, names in why.items())
    return (
        f"Free variables {quoted(reasons)} are discrete, and can't be summed out of the model; method 'ngvi' fits "
        f"continuous variables only. {said}. {_CURE}"
    )


# --- what depends on what ---------------------------------------------------------------------------------------------


def _reads(outputs: Iterable[Variable], model: pm.Model, discrete: Sequence[Variable]) -> list[Variable]:
    """Return the outputs that depend on discrete variables other than through random variables in between."""
    random = set(model.basic_RVs)

    def direct(output: Variable) -> bool:
        inputs = output.owner.inputs if output in random else [output]

        def expand(var: Variable) -> list[Variable] | None:
            return None if var.owner is None or var in random else list(var.owner.inputs)

        return any(var in wanted for var in walk(inputs, expand))

    wanted = set(discrete)
    return [output for output in outputs if direct(output)]


def _without_data(model: pm.Model, discrete: Sequence[Variable]) -> list[Variable]:
    """Return the discrete variables on which nothing depends but Deterministics, and such variables."""
    found: list[Variable] = []
    while True:
        others = [*(rv for rv in model.basic_RVs if rv not in found), *model.potentials]
        more = [rv for rv in discrete if rv not in found and not _reads(others, model, [rv])]
        if not more:
            return [rv for rv in discrete if rv in found]
        found += more


# --- what stands against it -------------------------------------------------------------------------------------------


def _reasons(model: pm.Model, used: Sequence[Variable]) -> dict[str, str]:
    """Return why discrete variables can't be summed out, by name; empty where all can."""
    if not used:
        return {}
    found = {str(rv.name): reason for rv in used if (reason := _reason(model, rv))}
    if found:
        return found
    if importlib.util.find_spec("pymc_extras") is None:
        return dict.fromkeys((str(rv.name) for rv in used), _NOT_INSTALLED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what pymc_extras imports
            from pymc_ngvi.density.discrete.states import CAN_SUM
    except ImportError:
        return dict.fromkeys((str(rv.name) for rv in used), _OTHER_VERSION)
    return {
        str(rv.name): f"it is {type(rv.owner.op).__name__.removesuffix('RV')}, and only {_CAN_SUM} can be summed out"
        for rv in used
        if not isinstance(rv.owner.op, CAN_SUM)
    }


def _reason(model: pm.Model, rv: Variable) -> str:
    """Return what in the model stands against summing a discrete variable out; empty where nothing does."""
    if potentials := _reads(model.potentials, model, [rv]):
        return f"the Potential {_names(potentials)} depends on it"
    dependent = _reads([other for other in model.basic_RVs if other is not rv], model, [rv])
    if batches := [other for other in dependent if isinstance(other.owner.op, MinibatchRandomVariable)]:
        return f"{_names(batches)}, which depends on it, has a total_size"
    if bounded := [other for other in dependent if _has_bounds(model.rvs_to_transforms.get(other))]:
        return f"{_names(bounded)}, which depends on it, has bounds"
    return ""


def _has_bounds(transform: object) -> bool:
    """Tell whether a transform reads the parameters of its variable, which are others without the discrete one."""
    parts = transform.transform_list if isinstance(transform, Chain) else [transform]
    return any(isinstance(part, IntervalTransform) for part in parts)


# --- the model without them -------------------------------------------------------------------------------------------


def _view(model: pm.Model, unused: Sequence[Variable], left_out: Sequence[Variable]) -> pm.Model:
    """Return the same model without variables on which no data depend, without Deterministics, and initial values.

    It shares all that it has with the model, which is not touched: for copies alone.
    """
    view = object.__new__(pm.Model)
    view.__dict__.update(model.__dict__)
    gone = {*unused, *left_out}
    names = {var.name for var in gone}
    view.named_vars = type(model.named_vars)({name: var for name, var in model.named_vars.items() if name not in names})
    view.free_RVs = [rv for rv in model.free_RVs if rv not in gone]
    view.deterministics = [d for d in model.deterministics if d not in gone]
    for mapping in ("rvs_to_values", "rvs_to_transforms"):
        setattr(view, mapping, {rv: value for rv, value in getattr(model, mapping).items() if rv not in gone})
    view.rvs_to_initial_values = {}
    for rv, value in view.rvs_to_values.items():  # PyMC copies no model whose data are of another type
        if value.type.dtype != rv.type.dtype:
            view.rvs_to_values[rv] = value.astype(rv.type.dtype)
    return view


def _marginalised(view: pm.Model, names: list[str]) -> pm.Model:
    """Return a copy of a model without some variables."""
    if not names:
        return clone_model(view)
    from pymc_ngvi.density.discrete.states import NotSummed, marginalised

    try:
        return marginalised(view, names)
    except NotSummed as error:
        reasons = {name: why for name in names if (why := _why_alone(view, name))}
        raise ValueError(_refusal(reasons or dict.fromkeys(names, str(error)))) from error


def _why_alone(view: pm.Model, name: str) -> str:
    """Return why one variable can't be summed out, even alone; empty where it can."""
    from pymc_ngvi.density.discrete.states import NotSummed, marginalised

    try:
        marginalised(view, [name])
    except NotSummed as error:
        return str(error)
    return ""


def _share(given: pm.Model, made: pm.Model) -> None:
    """Let a copy of a model have its data, coords, initial values and checks: it follows ``pm.set_data``."""
    for name, var in given.named_vars.items():
        if isinstance(var, SharedVariable) and name in made.named_vars:
            made[name].container = var.container
    for name, length in given.dim_lengths.items():
        if isinstance(length, SharedVariable):
            made.dim_lengths[name].container = length.container
    for rv in made.observed_RVs:  # equal constants have become one, which would have two log densities
        value = given.rvs_to_values[given[rv.name]]
        if isinstance(value, Constant):
            made.rvs_to_values[rv] = value
            made.values_to_rvs[value] = rv
    made._coords = given._coords
    made.check_bounds = given.check_bounds
    copies = {var: made[name] for name, var in given.named_vars.items() if name in made.named_vars}
    for rv, value in given.rvs_to_initial_values.items():
        if value is not None and rv in copies and copies[rv] in made.free_RVs:
            own = graph_replace([value], copies, strict=False)[0] if isinstance(value, Variable) else value
            made.rvs_to_initial_values[copies[rv]] = own
