"""Named of the conditionals of discrete variables, given the variables that depend on them."""

from collections.abc import Mapping, Sequence

import pytensor.tensor as pt

from pymc.distributions import DiscreteUniform, Gumbel
from pymc_extras.model.marginal.distributions.core import inline_ofg_outputs, marginalized_conditional
from pymc_extras.model.marginal.distributions.discrete_markov_chain import (
    _hmm_emission_logp,
    _hmm_log_init_and_transition,
)
from pymc_extras.model.marginal.distributions.enumerable import get_domain_of_finite_discrete_rv
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import graph_replace

from pymc_ngvi.density.discrete.states import SummedChain, SummedStates, joint_by_state
from pymc_ngvi.density.discrete.summing import SummedOut

#: Variables by name; inputs with outputs.
type Named = dict[str, Variable]
type Graphs = tuple[Named, Named]

_SUMMED = (SummedStates, SummedChain)


def given_data(summed: SummedOut) -> tuple[Graphs, dict[str, Graphs]]:
    """Return draws of discrete variables that data depend on, and what draws of Markov chains are made of, by name.

    Each with its inputs. Chains are apart where they are of first order, and no discrete variable depends on them. The
    discrete variables that they depend on are among their inputs.
    """
    model = summed.model
    inputs = {str(rv.name): rv.type(rv.name) for rv in model.free_RVs}
    known = {rv: inputs[rv.name] for rv in model.free_RVs} | {rv: model.rvs_to_values[rv] for rv in model.observed_RVs}
    found = {rv.owner: rv for rv in model.basic_RVs if isinstance(rv.owner.op, _SUMMED)}
    nodes = [_with_values(node, known) for node in found]
    drawn: Named = {}
    chains: dict[str, Graphs] = {}
    for node, values in nodes:
        drawn |= _drawn(node, values, inputs, chains)
    return (inputs, drawn), chains


def _is_plain_chain(op: Op) -> bool:
    """Tell whether a Markov chain of first order was summed out, and nothing after it."""
    if not isinstance(op, SummedChain):
        return False
    chain, *dependents = op.inner_outputs[: 1 + op.n_dependent_rvs]
    return chain.owner.op.n_lags == 1 and not any(isinstance(rv.owner.op, _SUMMED) for rv in dependents)


def _with_values(node: Apply, known: Mapping[Variable, Variable]) -> tuple[Apply, list[Variable]]:
    """Return the same node of values in the place of random variables, and the values of its own."""
    dependents = node.outputs[1 : 1 + node.op.n_dependent_rvs]
    others = {rv: value for rv, value in known.items() if rv not in dependents}
    inputs = graph_replace(node.inputs, others, strict=False)
    return node.op.make_node(*inputs), [known[rv] for rv in dependents]


def _drawn(node: Apply, values: Sequence[Variable], inputs: Named, chains: dict[str, Graphs]) -> Named:
    """Return draws of a discrete variable given those that depend on it, then of others given it; add chains apart."""
    op = node.op
    if _is_plain_chain(op):
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
