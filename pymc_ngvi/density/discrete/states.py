"""Log densities with discrete variables summed out, in graphs that can be differentiated, and draws of these."""

import math
import warnings

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.distributions import Bernoulli, Categorical, DiscreteUniform, Gumbel
from pymc.distributions.dist_math import check_parameters
from pymc.logprob.basic import conditional_logp, logp
from pymc.pytensorf import constant_fold, resolve_shapes
from pymc_extras.distributions import DiscreteMarkovChain
from pymc_extras.model.marginal.distributions.core import inline_ofg_outputs, marginalized_conditional
from pymc_extras.model.marginal.distributions.discrete_markov_chain import (
    MarginalDiscreteMarkovChainRV,
    _hmm_emission_logp,
    _hmm_log_init_and_transition,
    marginal_discrete_markov_chain_logp,
)
from pymc_extras.model.marginal.distributions.enumerable import (
    EnumerableMarginalRV,
    MarginalFiniteDiscreteRV,
    NonSeparableLogpWarning,
    align_logp_dims,
    build_enumerable_marginal_rv,
    get_domain_of_finite_discrete_rv,
    reduce_batch_dependent_logps,
)
from pymc_extras.model.marginal.marginalize import marginalize
from pymc_extras.model.marginal.rewrites import MarginalSubgraph, extract_marginal_subgraph, marginal_ir_rewrites_db
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph import (
    Apply,
    FunctionGraph,
    Op,
    RewriteDatabaseQuery,
    Variable,
    clone_replace,
    graph_replace,
    node_rewriter,
    vectorize_graph,
)
from pytensor.graph.traversal import toposort

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.graphs.private import logprob
from pymc_ngvi.graphs.rewrites import inline_inner_graphs

#: Nodes up to which a log density is written out for each state.
_FEW_NODES = 200
#: Of a variable whose elements can't be summed over one by one.
_MIXED = "each observation may depend on one element of it only ({why}); a few scalar variables would do in its place"
#: Distributions that can be summed out.
CAN_SUM = (Bernoulli, Categorical, DiscreteUniform, DiscreteMarkovChain)
#: What the rewrite of this module is found by.
_TAG = "pymc_ngvi"


#: Why variables could not be summed out, as far as rewrites know.
_WHY: ContextVar[list[str]] = ContextVar("why", default=[])  # noqa: B039 (set before each use)


class SummedStates(MarginalFiniteDiscreteRV):
    """Variables given which a finite discrete one is summed out."""


class SummedChain(MarginalDiscreteMarkovChainRV):
    """Variables given which a Markov chain is summed out."""


@logprob.register(SummedStates)  # type: ignore[untyped-decorator]
def _states_logp(op: SummedStates, values: Sequence[Variable], *inputs: Variable, **options: object) -> list[Variable]:
    """Return the log density of all variables, as that of the first one."""
    total = pt.logsumexp(joint_by_state(op, values, inputs, **options), axis=0)
    return [align_logp_dims(op.dims_connections[0], total), *(pt.constant(0.0) for _ in values[1:])]


def joint_by_state(
    op: SummedStates, values: Sequence[Variable], inputs: Sequence[Variable], **options: object
) -> Variable:
    """Return the log density of a discrete variable and of those that depend on it, by state along a first axis."""
    discrete, *others = inline_ofg_outputs(op, inputs)
    dependents = others[: op.n_dependent_rvs]
    state = _state(discrete, dependents)
    given = clone_replace(dependents, {discrete: state}, rebuild_strict=False)
    # Two variables with the same data would have one value.
    own = [value.type() for value in values]
    made = conditional_logp(dict(zip(given, own, strict=True)), **options)
    of_dependents = reduce_batch_dependent_logps(
        op.dims_connections, [rv.owner.op for rv in given], [made[value] for value in own]
    )
    [of_dependents] = graph_replace([of_dependents], dict(zip(own, values, strict=True)), strict=False)
    states = get_domain_of_finite_discrete_rv(discrete)
    shape = [1] * state.type.ndim
    if state.type.broadcastable != (True,) * state.type.ndim:
        shape = constant_fold(resolve_shapes(tuple(discrete.shape)), raise_not_constant=False)
    return _prior(discrete, state, states, shape) + _in_each_state(of_dependents, state, states, shape)


def _state(discrete: Variable, dependents: Sequence[Variable]) -> Variable:
    """Return what stands for a state.

    One for all elements, whose axes broadcast against those of the dependent variables; where another discrete variable
    is among these, one for each, since its inner graph takes no other shape.
    """
    if any(isinstance(rv.owner.op, EnumerableMarginalRV) for rv in dependents):
        return discrete.type("state")
    return pt.TensorType(discrete.type.dtype, shape=(1,) * discrete.type.ndim)("state")


def _prior(discrete: Variable, state: Variable, states: Variable, shape: Sequence[Variable]) -> Variable:
    """Return the log probability of each state, along a first axis."""
    node = discrete.owner
    if not isinstance(node.op, Categorical):
        return _in_each_state(logp(discrete, state), state, states, shape)
    [p] = node.op.dist_params(node)
    is_one = pt.isclose(pt.sum(p, axis=-1), 1)
    known = check_parameters(pt.log(p), p >= 0, p <= 1, is_one, msg="0 <= p <=1, sum(p) = 1")
    along = pt.moveaxis(known, -1, 0)
    new = discrete.type.ndim - (p.type.ndim - 1)
    return pt.expand_dims(along, tuple(range(1, new + 1)))


def _in_each_state(value: Variable, state: Variable, states: Variable, shape: Sequence[Variable]) -> Variable:
    """Return a value in each state, of a shape, along a first axis."""
    [known] = constant_fold([states], raise_not_constant=False)
    if isinstance(known, np.ndarray) and len(known) * len(list(toposort([value]))) <= _FEW_NODES:
        # A state that is known takes terms away that are 0 in it, whose derivatives would be NaN.
        each = [pt.full(shape, k, dtype=state.type.dtype) for k in known]
        return pt.stack([graph_replace(value, {state: k}, strict=False) for k in each])
    along = pt.as_tensor(known).astype(state.type.dtype)[(slice(None), *(None,) * state.type.ndim)]
    # What is within other graphs would be evaluated entry by entry.
    return vectorize_graph(inline_inner_graphs([value])[0], {state: pt.broadcast_to(along, (along.shape[0], *shape))})


@logprob.register(SummedChain)  # type: ignore[untyped-decorator]
def _chain_logp(op: SummedChain, values: Sequence[Variable], *inputs: Variable, **options: object) -> list[Variable]:
    """Return that of pymc_extras: the forward algorithm."""
    with warnings.catch_warnings(action="ignore", category=NonSeparableLogpWarning):
        total, *_ = marginal_discrete_markov_chain_logp(op, values, *inputs, **options)
    return [total, *(pt.constant(0.0) for _ in values[1:])]


@node_rewriter(tracks=[MarginalSubgraph])  # type: ignore[untyped-decorator]
def _sum_out(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Put our kinds in the place of a variable that pymc_extras has marked to be summed out."""
    inputs, outputs = extract_marginal_subgraph(node)
    kind = SummedChain if isinstance(outputs[0].owner.op, DiscreteMarkovChain) else SummedStates
    try:
        made: list[Variable] = build_enumerable_marginal_rv(node, inputs, outputs, kind)
    except (NotImplementedError, ValueError) as error:  # an error in a rewrite would be printed, and nothing else
        _WHY.get().append(str(error.__cause__ or error))
        return None
    return made


marginal_ir_rewrites_db.register("ngvi_sum_out", _sum_out, _TAG)


def marginalised(model: pm.Model, names: Sequence[str]) -> pm.Model:
    """Return a copy of a model without some discrete variables; raise ValueError that says why that can't be."""
    theirs = ["finite_discrete_marginal", "discrete_markov_chain_marginal"]
    query = RewriteDatabaseQuery(include=["basic", _TAG], exclude=theirs)
    why: list[str] = []
    token = _WHY.set(why)
    try:
        made: pm.Model = marginalize(model, list(names), rewrite_query=query)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(_MIXED.format(why=why[0].rstrip(".")) if why else str(error)) from error
    finally:
        _WHY.reset(token)
    for rv in made.basic_RVs:
        if isinstance(rv.owner.op, SummedStates):
            value = made.rvs_to_values[rv]
            n_states = _n_states(rv.owner)
            shape = value.get_value(borrow=True).shape if isinstance(value, SharedVariable) else value.type.shape
            n = n_states * math.prod(length or 1 for length in shape)
            if n > AT_ONCE:
                raise ValueError(
                    f"there are {n_states:,} states to sum over, for {n // n_states:,} elements of {rv.name!r}"
                )
    return made


def states_of(discrete: Variable) -> np.ndarray:
    """Return the values that a discrete variable may have."""
    values: np.ndarray = get_domain_of_finite_discrete_rv(discrete).eval()
    return values


def _n_states(node: Apply) -> int:
    """Return the number of states that are summed over, those of other variables within included."""
    discrete, *others = inline_ofg_outputs(node.op, node.inputs)
    [states] = constant_fold([get_domain_of_finite_discrete_rv(discrete)], raise_not_constant=False)
    within = {var.owner for var in others[: node.op.n_dependent_rvs] if isinstance(var.owner.op, SummedStates)}
    n = len(states) if isinstance(states, np.ndarray) else 1
    return n * math.prod(_n_states(inner) for inner in within)


# --- named of the conditionals of discrete variables, given the variables that depend on them ---

#: Variables by name; inputs with outputs.
type Named = dict[str, Variable]
type Graphs = tuple[Named, Named]

_SUMMED = (SummedStates, SummedChain)


def given_data(model: pm.Model) -> tuple[Graphs, dict[str, Graphs]]:
    """Return draws of discrete variables that data depend on, and what draws of Markov chains are made of, by name.

    Each with its inputs. Chains are apart where they are of first order, and no discrete variable depends on them. The
    discrete variables that they depend on are among their inputs.
    """
    inputs = {str(rv.name): rv.type(rv.name) for rv in model.free_RVs}
    known = {rv: inputs[rv.name] for rv in model.free_RVs} | {rv: model.rvs_to_values[rv] for rv in model.observed_RVs}
    found = {rv.owner: rv for rv in model.basic_RVs if isinstance(rv.owner.op, _SUMMED)}
    nodes = [_with_values(node, known) for node in found]
    drawn: Named = {}
    chains: dict[str, Graphs] = {}
    for node, values in nodes:
        drawn |= _drawn(node, values, inputs, chains)
    return (inputs, drawn), chains


def _with_values(node: Apply, known: Mapping[Variable, Variable]) -> tuple[Apply, list[Variable]]:
    """Return the same node of values in the place of random variables, and the values of its own."""
    dependents = node.outputs[1 : 1 + node.op.n_dependent_rvs]
    others = {rv: value for rv, value in known.items() if rv not in dependents}
    inputs = graph_replace(node.inputs, others, strict=False)
    return node.op.make_node(*inputs), [known[rv] for rv in dependents]


def _drawn(node: Apply, values: Sequence[Variable], inputs: Named, chains: dict[str, Graphs]) -> Named:
    """Return draws of a discrete variable given those that depend on it, then of others given it; add chains apart."""
    op = node.op
    of_op, *after = op.inner_outputs[: 1 + op.n_dependent_rvs]
    is_last = not any(isinstance(rv.owner.op, _SUMMED) for rv in after)
    if isinstance(op, SummedChain) and of_op.owner.op.n_lags == 1 and is_last:
        chain, *others = inline_ofg_outputs(op, node.inputs)
        emissions, states, shape = _hmm_emission_logp(op, chain, others[: op.n_dependent_rvs], values)
        first, transitions = _hmm_log_init_and_transition(chain, shape, states)
        varies = chain.owner.op.time_varying_P
        transitions = transitions if varies else transitions[None]
        chains[op.marginalized_name] = inputs, {"emissions": emissions, "first": first, "transitions": transitions}
        return {}
    discrete, *dependents = inline_ofg_outputs(op, node.inputs)
    dependents = dependents[: op.n_dependent_rvs]
    draw = _given(op, values, node.inputs, discrete)
    # Log densities are of values: a number stands for the draw until they are made.
    number = discrete.type(op.marginalized_name)
    known = dict(zip(dependents, values, strict=True))
    made = {op.marginalized_name: draw}
    for inner in {rv.owner: None for rv in dependents if isinstance(rv.owner.op, _SUMMED)}:
        inner_node, inner_values = _with_values(inner, {discrete: number, **known})
        within = _drawn(inner_node, inner_values, {**inputs, op.marginalized_name: number}, chains)
        made |= dict(zip(within, graph_replace(list(within.values()), {number: draw}, strict=False), strict=True))
    return made


def _given(op: Op, values: Sequence[Variable], inputs: Sequence[Variable], discrete: Variable) -> Variable:
    """Return a draw of one discrete variable given those that depend on it."""
    if isinstance(op, SummedChain):
        return marginalized_conditional(op, inputs, values)
    # The largest of log probabilities with Gumbel noise: PyTensor's categorical draws are loops.
    draw = pt.argmax(Gumbel.dist(mu=joint_by_state(op, values, inputs), beta=1.0), axis=0)
    if isinstance(discrete.owner.op, DiscreteUniform):
        draw += get_domain_of_finite_discrete_rv(discrete)[0].astype(draw.dtype)
    return draw.astype(discrete.dtype)
