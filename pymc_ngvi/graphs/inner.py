"""Graphs inside of nodes, and copies of graphs to rewrite."""

from pytensor.compile.builders import OpFromGraph
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph.basic import Apply, Variable, clone
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter


@node_rewriter([OpFromGraph])  # type: ignore[untyped-decorator]
def _inline(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    return list(inline_ofg_node(node))


def copy_of(outputs: list[Variable]) -> FunctionGraph:
    """Return a graph to rewrite, with the same inputs.

    Graphs of a model share their nodes. Without a copy, the rounding of a gradient would depend on whether its
    derivatives were made before it was compiled.
    """
    return FunctionGraph(outputs=clone([], outputs, copy_inputs=False)[1], clone=False, copy_inputs=False)


def inline_inner_graphs(outputs: list[Variable]) -> list[Variable]:
    """Replace every node that wraps a graph of its own (log-sum-exp, softmax, ...) by that graph.

    Last thing before vectorising, after all derivatives, which those nodes define in a stable way: a wrapped graph
    would be run draw by draw, and compiled by itself.
    """
    fgraph = copy_of(outputs)
    while any(isinstance(node.op, OpFromGraph) for node in fgraph.apply_nodes):
        dfs_rewriter(_inline).rewrite(fgraph)
    return list(fgraph.outputs)
