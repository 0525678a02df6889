"""Discrete free variables: a model without them, and draws of them given each draw of the others."""

import importlib.util
import warnings

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor

from pymc.logprob.transforms import IntervalTransform
from pymc.model.fgraph import clone_model
from pymc.pytensorf import find_rng_nodes
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile import SharedVariable
from pytensor.graph import Constant, Variable, graph_replace
from pytensor.graph.traversal import ancestors
from scipy.special import logsumexp

from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.density.info import quoted
from pymc_ngvi.density.over_draws import OnDraws, drawn_anew, known_at_draws
from pymc_ngvi.graphs.backends import without_c

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


def summed_out(model: pm.Model, *, is_whole: bool = True) -> SummedOut:
    """Sum discrete free variables out of a model; raise ValueError where only a part of it is evaluated here."""
    discrete = [rv for rv in model.free_RVs if rv.dtype.startswith(("int", "uint", "bool"))]
    if not discrete:
        return SummedOut(model, model, (), (), ())
    if not is_whole:
        reason = "data in batches or shards are not summed over"
        raise ValueError(_refusal(dict.fromkeys((str(rv.name) for rv in discrete), reason)))
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
        return not wanted.isdisjoint(ancestors(inputs, random))

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
        with warnings.catch_warnings(action="ignore"):  # of what pymc_extras imports
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
    transforms = [(other, model.rvs_to_transforms.get(other)) for other in dependent]
    parts = [(other, part) for other, of in transforms for part in getattr(of, "transform_list", [of])]
    # These read the parameters of their variable, which are others without the discrete one.
    if bounded := [other for other, part in parts if isinstance(part, IntervalTransform)]:
        return f"{_names(bounded)}, which depends on it, has bounds"
    whole = str(rv.name).removesuffix("_unobserved")  # PyMC's name for values that are missing
    if dependent and whole != rv.name and whole in model.named_vars:
        return (
            f"these are the missing values of {whole!r}, and {_names(dependent)} reads them in one array with the "
            f"observed ones. Split the rows into those where {whole!r} is observed and those where it is missing, each "
            "with a likelihood of its own; the missing values are then a discrete variable of their own, such as "
            "pm.Bernoulli('missing', p, shape=n_missing)"
        )
    return ""


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
    from pymc_ngvi.density.discrete.states import marginalised

    try:
        return marginalised(view, names)
    except ValueError as error:
        reasons = {}
        for name in names:
            try:
                marginalised(view, [name])
            except ValueError as own:
                reasons[name] = str(own)
        raise ValueError(_refusal(reasons or dict.fromkeys(names, str(error)))) from error


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


# --- draws of discrete variables that were summed out, given each draw of the others, and what depends on them ---

type Values = Mapping[str, AnyArray]
#: Inputs, and outputs, by name.
type Graphs = tuple[dict[str, Variable], dict[str, Variable]]


class DiscreteDraws:
    """Draws discrete variables that were summed out, and evaluates Deterministics that depend on them.

    Functions read the model's data when they are called.
    """

    def __init__(self, summed: SummedOut) -> None:
        self._summed = summed
        by_state: Graphs = {}, {}
        chains: dict[str, Graphs] = {}
        if len(summed.unused) < len(summed.names):
            from pymc_ngvi.density.discrete.states import given_data

            with without_c():
                by_state, chains = given_data(summed.model)
        self._by_state = _OverDraws(summed.given, *by_state)
        self._chains = {name: _OverDraws(summed.given, *terms) for name, terms in chains.items()}
        self._rest = _OverDraws(summed.given, *_rest(summed))

    def __call__(self, values: Values, random_seed: int | None) -> dict[str, AnyArray]:
        """Return draws of discrete variables, then Deterministics, (n_draws, ...), for draws of the others."""
        seeds = [int(s.generate_state(1)[0]) for s in np.random.SeedSequence(random_seed).spawn(len(self._chains) + 2)]
        drawn = self._by_state(values, seeds.pop())
        for name, terms in self._chains.items():
            of_chain = terms({**values, **drawn})
            rng = np.random.default_rng(seeds.pop())
            drawn[name] = draw_chains(of_chain["emissions"], of_chain["first"], of_chain["transitions"], rng)
        made = {**drawn, **self._rest({**values, **drawn}, seeds.pop())}
        return {name: made[name] for name in self._summed.shown}


class _OverDraws:
    """Functions of named variables, evaluated at many draws of these."""

    def __init__(self, model: pm.Model, inputs: dict[str, Variable], outputs: dict[str, Variable]) -> None:
        self._model, self._inputs, self._outputs = model, inputs, outputs
        self._function: OnDraws | None = None
        self._shapes = list[tuple[int, ...]]()

    def __call__(self, values: Values, random_seed: int = 0) -> dict[str, AnyArray]:
        """Return the outputs, (n_draws, ...), at values of all inputs."""
        if not self._outputs:
            return {}
        given = {var: np.asarray(values[name]) for name, var in self._inputs.items()}
        flat, parts, draws = known_at_draws(given, len(next(iter(given.values()))))
        shapes = [value.shape[1:] for value in given.values()]
        if self._function is None or self._shapes != shapes:  # the data may have another length by now
            made, self._shapes = list(self._outputs.values()), shapes
            own = {rng: pytensor.shared(np.random.default_rng()) for rng in find_rng_nodes(made)}  # not the model's
            with without_c():
                outputs = drawn_anew(list(graph_replace(made, {**own, **parts}, strict=False)), flat[0])
                self._function = OnDraws(self._model, flat, outputs)
        self._function.reseed(random_seed)
        return dict(zip(self._outputs, self._function(draws), strict=True))


def _rest(summed: SummedOut) -> Graphs:
    """Return inputs, and discrete variables on which no data depend, with Deterministics, given these."""
    model = summed.given
    known = [rv for rv in model.free_RVs if rv.name not in summed.unused]
    inputs = {str(rv.name): rv.type(rv.name) for rv in known}
    names = [*summed.unused, *summed.deterministics]
    data = {rv: model.rvs_to_values[rv] for rv in model.observed_RVs}
    given = data | {rv: inputs[rv.name] for rv in known}
    made = graph_replace([model[name] for name in names], given, strict=False)
    return inputs, dict(zip(names, made, strict=True))


# --- chains -----------------------------------------------------------------------------------------------------------


def draw_chains(emissions: Array, first: Array, transitions: Array, rng: np.random.Generator) -> AnyArray:
    """Draw states of Markov chains given what depends on them: filtered forwards, drawn backwards."""
    n_times, steps = emissions.shape[-1], transitions.shape[1]
    filtered = [first + emissions[..., 0]]
    for t in range(1, n_times):
        of_step = transitions[:, min(t - 1, steps - 1)]
        filtered.append(logsumexp(filtered[-1][:, :, None] + of_step, axis=1) + emissions[..., t])
    states = [_drawn_states(filtered[-1], rng)]
    for t in range(n_times - 2, -1, -1):
        of_step = transitions[:, min(t, steps - 1)]
        following = np.broadcast_to(of_step, (*filtered[t].shape[:2], *filtered[t].shape[1:]))
        chosen = np.take_along_axis(following, states[-1][:, None, None], axis=2)[:, :, 0]
        states.append(_drawn_states(filtered[t] + chosen, rng))
    return np.stack(states[::-1], axis=-1)


def _drawn_states(logits: Array, rng: np.random.Generator) -> AnyArray:
    """Draw a state, (n_draws, ...), for log probabilities (n_draws, n_states, ...), up to a constant."""
    return (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
