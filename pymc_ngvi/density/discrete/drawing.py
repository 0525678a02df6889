"""Draws of discrete variables that were summed out, given each draw of the others, and what depends on them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import find_rng_nodes, reseed_rngs
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace, vectorize_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.random.op import RNGConsumerOp
from scipy.special import logsumexp

from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.density.discrete.summing import SummedOut
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.ops import cost

type Values = Mapping[str, AnyArray]
#: Inputs, and outputs, by name.
type Graphs = tuple[dict[str, Variable], dict[str, Variable]]

#: Elements of a temporary in one call, and draws.
_BATCH_ELEMENTS, _MOST_AT_ONCE = 2**18, 512


class DiscreteDraws:
    """Draws discrete variables that were summed out, and evaluates Deterministics that depend on them.

    Functions read the model's data when they are called.
    """

    def __init__(self, summed: SummedOut) -> None:
        self._summed = summed
        by_state, chains = _given_data(summed)
        self._by_state = _OverDraws(*by_state)
        self._chains = {name: _OverDraws(*terms) for name, terms in chains.items()}
        self._rest = _OverDraws(*_rest(summed))

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

    def __init__(self, inputs: dict[str, Variable], outputs: dict[str, Variable]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._function: Function | None = None
        self._at_once = 0  # draws; 0 where they are evaluated one by one
        generators = find_rng_nodes(list(outputs.values()))
        # The model's own generators stay as they are.
        self._rngs = [pytensor.shared(np.random.default_rng()) for _ in generators]
        own = dict(zip(generators, self._rngs, strict=True))
        self._graphs = graph_replace(list(outputs.values()), own, strict=False) if own else list(outputs.values())

    def __call__(self, values: Values, random_seed: int = 0) -> dict[str, AnyArray]:
        """Return the outputs, (n_draws, ...), at values of all inputs."""
        if not self._outputs:
            return {}
        if self._function is None:
            with without_c():
                inputs = list(self._inputs.values())
                batched = [pt.TensorType(var.type.dtype, shape=(None, *var.type.shape))(var.name) for var in inputs]
                try:
                    made = vectorize_graph(self._graphs, dict(zip(inputs, batched, strict=True)))
                except Exception:  # of any kind, for an Op that can't be vectorised: draw by draw always works
                    made = None
                if made is None or not _differ(made, self._graphs, batched):
                    self._at_once, arguments, made = 0, inputs, self._graphs
                else:
                    widest = cost.estimate(self._graphs).widest
                    self._at_once = int(np.clip(_BATCH_ELEMENTS // max(widest, 1), 1, _MOST_AT_ONCE))
                    arguments = batched
                self._function = pymc_compile(arguments, made, on_unused_input="ignore", mode=quick_mode())
        assert self._function is not None
        reseed_rngs(self._rngs, random_seed)
        given = [np.asarray(values[name], dtype=var.type.dtype) for name, var in self._inputs.items()]
        with np.errstate(all="ignore"):
            parts = [self._function(*[g[at] for g in given]) for at in self._parts(len(given[0]))]
        join = np.concatenate if self._at_once else np.stack
        return {name: join(part) for name, part in zip(self._outputs, zip(*parts, strict=True), strict=True)}

    def _parts(self, n: int) -> Sequence[slice] | range:
        """Return which draws go together: some at a time, or one by one."""
        return [slice(k, k + self._at_once) for k in range(0, n, self._at_once)] if self._at_once else range(n)


def _differ(made: Sequence[Variable], single: Sequence[Variable], inputs: Sequence[Variable]) -> bool:
    """Tell whether all outputs have an axis of draws, and all random numbers depend on what differs among these."""
    random = [node for node in toposort(made) if isinstance(node.op, RNGConsumerOp)]
    depend = all(not set(inputs).isdisjoint(ancestors(node.inputs)) for node in random)
    return depend and all(m.type.ndim == s.type.ndim + 1 for m, s in zip(made, single, strict=True))


def _given_data(summed: SummedOut) -> tuple[Graphs, dict[str, Graphs]]:
    """Return draws of variables that data depend on, and what draws of chains are made of, by name."""
    if len(summed.unused) == len(summed.names):
        return ({}, {}), {}
    from pymc_ngvi.density.discrete.conditionals import given_data

    with without_c():
        return given_data(summed)


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
