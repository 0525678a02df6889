"""What is made of the gradients of all rows in one backward pass, where a check on single rows agrees."""

import logging

from collections.abc import Callable
from typing import NamedTuple

import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace

from pymc_ngvi.density.gauss_newton.agreement import agrees
from pymc_ngvi.density.gauss_newton.parts import NO_DERIVATIVE, GaussNewtonGraphs
from pymc_ngvi.density.gauss_newton.taps import NoLayers
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c

logger = logging.getLogger("pymc.ngvi")


class ByLayers(NamedTuple):
    """A function of the flat vector.

    Parameters
    ----------
    found : pytensor variable
        At one draw.
    draws, batched : pytensor variables
        Draws, (n_draws, n_dim), and what is found at each, along the first axis.
    """

    found: Variable
    draws: Variable
    batched: Variable


def by_layers(
    parts: GaussNewtonGraphs,
    of_rows: Callable[[list[Variable]], Variable],
    squares_of: Callable[[Variable], Variable] = lambda found: found,
) -> ByLayers | None:
    """Return a function of the flat vector, as graphs, that has the gradients of all rows in one backward pass.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    of_rows : callable
        From weights of the log densities of rows to the graph.
    squares_of : callable, optional
        From the graph to the sums of squared gradients, (n_dim,). Default: it has these.

    Returns
    -------
    ByLayers or None
        For weights 1. None where the graph of the model does not show that rows are apart, or single rows disagree.
    """
    if parts.graphs.shares_calls:  # recursions, whose steps are no layers
        return None
    weights = [row.type() for row in parts.rows]
    try:
        with without_c():
            found = of_rows(weights)
            if not agrees(parts, weights, squares_of(found)):
                logger.info("Gradients by layers are not those of single rows: they are found one by one.")
                return None
            ones = {w: pt.ones_like(row) for w, row in zip(weights, parts.rows, strict=True)}
            [found] = parts.graphs.simplify(list(graph_replace([found], ones, strict=False)))
            draws, [batched] = graph.over_draws([found], parts.theta)
    except (NoLayers, graph.MissingDerivativeError, *NO_DERIVATIVE) as error:
        logger.debug("No gradients by layers: %s", error)
        return None
    return ByLayers(found, draws, batched)
