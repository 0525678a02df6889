"""Loops and recursions: all draws take each step together, and what is written out step by step stays small."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import reduce

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph import Apply, FunctionGraph, Variable, graph_replace, vectorize_graph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scan.op import Scan, ScanInfo
from pytensor.tensor.basic import Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.special import LogAddExp, LogSumExp
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, inc_subtensor, indices_from_subtensor
from pytensor.tensor.variable import TensorConstant

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.graphs.rewrites import copy_of, inline_inner_graphs, rewritten


def hold_by_rows(outputs: list[Variable], indices: Collection[Variable]) -> list[Variable]:
    """Make shared variables, stored row by row, of constants whose rows are taken by an index that changes.

    Arrays made of data frames are stored column by column: taking 1,000 rows of 785 columns was seven times as slow.
    """
    found = {}
    for node in toposort(outputs):
        if isinstance(node.op, AdvancedSubtensor) and node.inputs[1] in indices:
            var = node.inputs[0]
            if isinstance(var, TensorConstant) and var.type.ndim > 1:
                found[var] = pytensor.shared(np.ascontiguousarray(var.data), borrow=True, shape=var.data.shape)
    return list(graph_replace(outputs, found, strict=False)) if found else outputs


#: Nodes of a log density beyond which rewriting all that is made of it takes longer than it saves: about 5 ms for each
#: of several times as many, and more than in proportion. Models that are written with vectors have 50 to 300.
_LARGE = 500
#: Terms of all sums for each node of a graph, were sums of sums written as one: up to 1 in models written with vectors,
#: 30 where 30 steps each add to what all steps before have added.
_MOST_TERMS = 4
#: Times that arrays are joined: models written with vectors join three at most.
_MOST_JOINED = 6
#: Rewrites that write sums of sums, and products of products, as one, again at each place where they are used.
FLATTENING = ("local_add_canonizer", "local_mul_canonizer", "local_greedy_distributor")
#: What is left of the rewrites for the functions of a large graph, whose parts were simplified before.
FEW = (
    "merge",
    "canonicalize_db",
    "constant_folding",
    "local_mul_zero",
    "local_second_sink",
    "local_useless_elemwise",
    "local_useless_fill",
    "local_useless_unbatched_blockwise",
)


def is_large(logp: Variable) -> bool:
    """Tell whether a log density, before it is simplified, makes large graphs."""
    nodes = list(toposort([logp]))
    # PyTensor goes through the shapes of what is joined again and again: a recursion in halves takes minutes.
    n_joined = sum(isinstance(node.op, Join) for node in nodes)
    return len(nodes) > _LARGE or n_joined > _MOST_JOINED or _flat_terms(nodes, [logp]) > _MOST_TERMS * len(nodes)


def _flat_terms(nodes: list[Apply], outputs: list[Variable]) -> int:
    """Count the terms of all sums, were each that is used by anything but a sum written as one."""
    terms: dict[Variable, int] = {}
    used = set(outputs)
    for node in nodes:
        [out, *_] = node.outputs
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Add | ps.Sub):
            terms[out] = sum(terms.get(i, 1) for i in node.inputs)
        elif isinstance(node.op, DimShuffle) and node.op.is_left_expand_dims:
            terms[out] = terms.get(node.inputs[0], 1)
        else:
            used.update(node.inputs)
    return sum(n for var, n in terms.items() if var in used)


class ScalarLogAddExp(ps.BinaryScalarOp):
    """log(exp(x) + exp(y)), with derivatives of two nodes each."""

    nfunc_spec = ("numpy.logaddexp", 2, 1)

    def impl(self, x: float, y: float) -> float:
        """Return the value of one element."""
        return float(np.logaddexp(x, y))

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], output_gradients: list[Variable]
    ) -> list[Variable]:
        """Return the derivatives."""
        x, y = inputs
        [g] = output_gradients
        return [g * ps.sigmoid(x - y), g * ps.sigmoid(y - x)]


class _ShortLogSumExp(LogSumExp):
    """PyTensor's, with a derivative from its value: PyTensor differentiates each step of it."""

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], output_gradients: list[Variable]
    ) -> list[Variable]:
        [x], [out], [g] = inputs, outputs, output_gradients
        return [pt.expand_dims(g, self.axis) * pt.exp(x - pt.expand_dims(out, self.axis))]


_log_add_exp = Elemwise(ScalarLogAddExp(ps.upgrade_to_float, name="log_add_exp"), name="LogAddExp")


@node_rewriter([LogAddExp, LogSumExp])  # type: ignore[untyped-decorator]
def _short_derivative(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    if isinstance(node.op, _ShortLogSumExp):
        return None
    if isinstance(node.op, LogSumExp):
        return [_ShortLogSumExp(axis=node.op.axis)(*node.inputs)]
    return [short_log_add_exp(node.inputs)]


def short_log_add_exp(terms: list[Variable]) -> Variable:
    """Return the log of the sum of exponentials of variables, with derivatives of few nodes."""
    return reduce(_log_add_exp, terms)


#: Puts in the place of log-sums of exponentials, of which recursions consist, others with fewer nodes.
short_derivatives = dfs_rewriter(_short_derivative)


# --- vectorising graphs with loops (`pytensor.scan`): all draws and directions take each step of a loop together ---

#: Draws in one call of a function whose thunks take longer than their work.
MOST_DRAWS = 128


def draws_in_call(n_elements: int) -> int:
    """Return how many draws one call should take, from the elements of the largest temporary of one."""
    return min(max(AT_ONCE // max(n_elements, 1), 1), MOST_DRAWS)


def with_short_steps(outputs: list[Variable], simplify: Callable[[list[Variable]], list[Variable]]) -> list[Variable]:
    """Return outputs with the steps of loops simplified, and without what does not depend on the states of a loop.

    That is evaluated for all steps at once. PyTensor rewrites a step when its loop is compiled: too late for
    derivatives, and for draws outside of the support, which raise an error there.
    """
    fgraph = copy_of(outputs)
    for node in [node for node in fgraph.toposort() if isinstance(node.op, Scan)]:
        inner = node.op.fgraph
        entries = [i.type() for i in inner.inputs]
        step = simplify(list(inner.bind(dict(zip(inner.inputs, entries, strict=True)))))
        new = _hoisted(node, entries, with_short_steps(step, simplify))
        fgraph.replace_all(list(zip(node.outputs, new, strict=True)), import_missing=True)
    return simplify(list(fgraph.outputs))


def _hoisted(node: Apply, entries: list[Variable], step: list[Variable]) -> list[Variable]:
    """Return the outputs of a loop that reads what its step makes of sequences, and of what stays the same."""
    op, n_steps, n_seqs = node.op, node.inputs[0], node.op.info.n_seqs
    first_fixed = len(entries) - op.info.n_non_seqs
    outer_fixed = node.inputs[len(node.inputs) - op.info.n_non_seqs :]
    # What a step makes without its states, and reads together with them.
    later, read = set(entries[n_seqs:first_fixed]), dict.fromkeys(step)
    for one in toposort(step, blockers=entries):
        if not later.isdisjoint(one.inputs):
            later.update(one.outputs)
            read.update(dict.fromkeys(one.inputs))
    found = [var for var in read if var not in later and var.owner is not None and var not in entries]
    if not found:
        return list(_loop(op, op.info, entries, step)(*node.inputs, return_list=True))
    replaced = dict(zip(entries[first_fixed:], outer_fixed, strict=True))
    replaced |= {entry: seq[:n_steps] for entry, seq in zip(entries, node.inputs[1 : 1 + n_seqs], strict=False)}
    new = [var.type() for var in found]
    outer = [_of_shape(out, var) for out, var in zip(vectorised(found, replaced), found, strict=True)]
    step = graph_replace(step, dict(zip(found, new, strict=True)), strict=False)
    has_steps = [o.type.ndim > var.type.ndim for o, var in zip(outer, found, strict=True)]
    seqs, fixed = ([k for k, varies in enumerate(has_steps) if varies is wanted] for wanted in (True, False))
    info = replace(op.info, n_seqs=n_seqs + len(seqs), n_non_seqs=op.info.n_non_seqs + len(fixed))
    entries = [
        *entries[:n_seqs], *[new[k] for k in seqs], *entries[n_seqs:], *[new[k] for k in fixed],
    ]  # fmt: skip
    inputs = [
        *node.inputs[: 1 + n_seqs], *[outer[k] for k in seqs], *node.inputs[1 + n_seqs :], *[outer[k] for k in fixed],
    ]  # fmt: skip
    return list(_loop(op, info, entries, step)(*inputs, return_list=True))


def _of_shape(out: Variable, var: Variable) -> Variable:
    """Return a variable, whatever axes it has in front, with what is known of the shape of another."""
    shape = (*out.type.shape[: out.type.ndim - var.type.ndim], *var.type.shape)
    return out if out.type.shape == shape else pt.specify_shape(out, shape)


def _loop(op: Scan, info: ScanInfo, entries: list[Variable], step: list[Variable]) -> Scan:
    """Return a loop with another step."""
    return Scan(
        entries, step, info, mode=op.mode, truncate_gradient=op.truncate_gradient,
        name=op.name, profile=op.profile, allow_gc=op.allow_gc, strict=op.strict,
    )  # fmt: skip


def vectorised(outputs: list[Variable], replacements: Mapping[Variable, Variable]) -> list[Variable]:
    """Return outputs for a batch of the variables that are replaced, by one with leading axes each.

    Outputs that depend on none of them come back without these axes.
    """
    batched = list(vectorize_graph(inline_inner_graphs(outputs), dict(replacements)))
    if not any(_is_loop_per_entry(var.owner) for var in ancestors(batched)):
        return batched
    return rewritten(batched, _one_loop, _in_place_of_entries)


def _over_batch(var: Variable, n_batch: int, inputs: list[Variable]) -> Variable:
    """Return a variable repeated along its axes of a batch of length 1, to the lengths that ``inputs`` have.

    ``broadcast_to`` would look for the lengths as constants: seconds, in a large graph.
    """
    for axis in range(n_batch):
        like = next((i for i in inputs if not i.type.broadcastable[axis]), None)
        if var.type.broadcastable[axis] and like is not None:
            length = like.sum(axis=tuple(a for a in range(like.type.ndim) if a != axis))
            length = length.reshape((-1, *[1] * (var.type.ndim - axis - 1)))
            var = pt.second(length.astype(var.type.dtype), var)
    return var


@node_rewriter([Blockwise])  # type: ignore[untyped-decorator]
def _batched_increment(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Set, or add to, the same elements of all entries at once, as PyTensor does later by ``broadcast_to``."""
    op = node.op.core_op
    if not isinstance(op, IncSubtensor) or not all(all(i.type.broadcastable) for i in node.inputs[2:]):
        return None
    n_batch = node.op.batch_ndim(node)
    x, y, *indices = node.inputs
    at = (slice(None),) * n_batch + tuple(indices_from_subtensor([i.squeeze() for i in indices], op.idx_list))
    part = _over_batch(x, n_batch, node.inputs)[at]
    y = pt.expand_dims(y, tuple(range(n_batch, n_batch + part.type.ndim - y.type.ndim)))
    return [inc_subtensor(part, y, set_instead_of_inc=op.set_instead_of_inc)]


_in_place_of_entries = dfs_rewriter(_batched_increment)


def _is_loop_per_entry(node: Apply | None) -> bool:
    return node is not None and isinstance(node.op, Blockwise) and isinstance(node.op.core_op, Scan)


@node_rewriter([Blockwise])  # type: ignore[untyped-decorator]
def _batched_loop(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace a loop that is run for each entry of a batch by one that takes the batch along."""
    return _BatchedLoop(node).outputs() if _is_loop_per_entry(node) else None


_one_loop = dfs_rewriter(_batched_loop)


class _BatchedLoop:
    """One loop in the place of a node that runs a loop for each entry of a batch."""

    def __init__(self, node: Apply) -> None:
        self.node, self.op = node, node.op.core_op
        self.places = self.op.get_oinp_iinp_iout_oout_mappings()
        info = self.op.info
        self.n_batch = node.outputs[0].type.ndim - self.op.output_types[0].ndim
        self.batched = {k for k, given in enumerate(node.inputs) if not all(given.type.broadcastable[: self.n_batch])}
        self.first_state = 1 + info.n_seqs
        self.first_untraced = self.first_state + info.n_mit_mot + info.n_mit_sot + info.n_sit_sot
        self.first_length = self.first_untraced + info.n_untraced_sit_sot
        self.first_fixed = self.first_length + info.n_nit_sot

    def outputs(self) -> list[Variable] | None:
        """Return what stands for the outputs of the node; None where entries may take different numbers of steps."""
        inner = self.op.fgraph
        entries = [i.type() for i in inner.inputs]
        step = inline_inner_graphs(list(inner.bind(dict(zip(inner.inputs, entries, strict=True)))))
        places, missing = self.places["inner_out_from_outer_inp"], [-1]
        while missing:
            states = [k for k in range(self.first_state, self.first_length) if k not in self.batched]
            missing = [k for k in states if any(self._depends(step[i], entries) for i in places[k])]
            self.batched.update(missing)
        if any(k == 0 or self.first_length <= k < self.first_fixed for k in self.batched):
            return None
        if self.op.info.as_while and self._depends(step[-1], entries):
            return None
        outer, inner_of = self._inputs(), self._entries(entries)
        changed = {old: new for old, new in zip(entries, inner_of, strict=True) if new is not old}
        new_step = self._like_states(vectorised(step, changed), step, inner_of)
        loop = _loop(self.op, self.op.info, inner_of, new_step)
        return [self._output(k, out) for k, out in enumerate(loop(*outer, return_list=True))]

    def _is_state(self, k: int) -> bool:
        return bool(self.first_state <= k < self.first_length)

    def _depends(self, out: Variable, entries: list[Variable]) -> bool:
        """Tell whether an output of the step differs between entries of the batch."""
        inner = {entries[i] for k in self.batched for i in self.places["inner_inp_from_outer_inp"][k] if i >= 0}
        return any(var in inner for var in ancestors([out]))

    def _inputs(self) -> list[Variable]:
        """Return the inputs of the loop, with the axis of steps before those of the batch."""
        result = []
        for k, given in enumerate(self.node.inputs):
            if k not in self.batched:
                result.append(given.squeeze(tuple(range(self.n_batch))))
                continue
            if self._is_state(k):  # whose shape stays the same from step to step
                given = _over_batch(given, self.n_batch, self.node.inputs)
            result.append(pt.moveaxis(given, self.n_batch, 0) if 1 <= k < self.first_untraced else given)
        return result

    def _entries(self, entries: list[Variable]) -> list[Variable]:
        """Return the inputs of the step."""
        result = list(entries)
        for k in self.batched:
            given = self.node.inputs[k]
            axes = tuple(1 if b and not self._is_state(k) else None for b in given.type.broadcastable[: self.n_batch])
            for i in self.places["inner_inp_from_outer_inp"][k]:
                result[i] = pt.tensor(dtype=entries[i].type.dtype, shape=(*axes, *entries[i].type.shape))
        return result

    def _like_states(self, new: list[Variable], old: list[Variable], entries: list[Variable]) -> list[Variable]:
        """Return the outputs of the step; those that become states have the axes of the batch, whatever they are."""
        result = list(new)
        for k in self.batched:
            if not self._is_state(k):
                continue
            state = entries[self.places["inner_inp_from_outer_inp"][k][0]]
            for i in self.places["inner_out_from_outer_inp"][k]:
                if new[i].type.ndim < state.type.ndim or any(new[i].type.broadcastable[: self.n_batch]):
                    result[i] = pt.second(state, new[i])
        return result

    def _output(self, k: int, out: Variable) -> Variable:
        wanted, n = self.node.outputs[k].type, self.n_batch
        if out.type.ndim < wanted.ndim:
            out = pt.shape_padleft(out, n)
        elif k < len(self.op.output_types) - self.op.info.n_untraced_sit_sot:
            out = pt.moveaxis(out, 0, n)
        return _over_batch(out, n, self.node.inputs)
