"""Outputs of graphs at many draws: over a batch of draws at once, or one by one where that can't be."""

import contextlib
import functools

from collections.abc import Callable, Mapping

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import find_rng_nodes, reseed_rngs
from pytensor.compile import Function
from pytensor.graph import Variable
from pytensor.tensor.random.basic import BernoulliRV, uniform
from pytensor.tensor.random.op import RandomVariable

from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.rewrites import copy_of, inline_inner_graphs
from pymc_ngvi.ops import cost

#: Draws that share the time of calls, in estimates.
_AT_ONCE = 32
#: Draws in a call at most: of so many, calls take less time than their work even in small models.
MOST_AT_ONCE = 512


class OnDraws:
    """Evaluates functions of one flat vector at draws of it, by NumPy calls: nothing is compiled to machine code."""

    def __init__(self, model: pm.Model, theta: Variable, outputs: list[Variable], *, one_by_one: bool = False) -> None:
        self._model, self._theta, self._outputs = model, theta, outputs
        self._rngs = find_rng_nodes(outputs)
        self._widest = cost.estimate(outputs).widest
        self.seconds = cost.evaluation_seconds(outputs, batch=1 if one_by_one else _AT_ONCE)
        #: None where draws are evaluated one by one.
        self._batched: Function | None = None
        if not one_by_one:
            # Whatever PyTensor raises for an Op that it can't vectorise: draw by draw always works.
            with contextlib.suppress(Exception):
                self._batched = self._compiled(*graph.over_draws(outputs, theta))

    def _compiled(self, argument: Variable, outputs: list[Variable]) -> Function:
        with self._model:
            function: Function = pymc_compile(
                [argument], outputs, on_unused_input="ignore", trust_input=True, mode=quick_mode()
            )
        return function

    def reseed(self, random_seed: int) -> None:
        """Seed the random numbers that the outputs draw."""
        if self._batched is None:
            _ = self._plain  # which is compiled before: PyMC seeds what it compiles
        reseed_rngs(self._rngs, random_seed)

    def __call__(self, theta: Array) -> list[AnyArray]:
        """Return the outputs at draws, (n_draws, n_dim), each with an axis of draws in front."""
        with np.errstate(all="ignore"):  # draws may overflow on the constrained scale
            if self._batched is not None:
                # Some vectorised graphs compile and then fail. If the plain graph fails too, its message is clearer.
                with contextlib.suppress(Exception):
                    return self._in_batches(theta, self._batched)
            draws = [[np.asarray(out) for out in self._plain(np.ascontiguousarray(row))] for row in theta]
            self._batched = None  # where the plain graph fails as well, the data may be put right again
            return [np.stack(column) for column in zip(*draws, strict=True)]

    @functools.cached_property
    def _plain(self) -> Function:
        with without_c():
            return self._compiled(self._theta, self._outputs)

    def _in_batches(self, theta: Array, function: Function) -> list[AnyArray]:
        size, start = int(np.clip(CACHED // max(self._widest, 1), 1, MOST_AT_ONCE)), 0
        results: list[AnyArray] = []
        while start < len(theta):
            rows = np.ascontiguousarray(theta[start : start + size], dtype=np.float64)
            parts = [np.asarray(part) for part in function(rows)]
            if not results:
                results = [np.empty((len(theta), *part.shape[1:]), part.dtype) for part in parts]
                # The data may have grown since the graph was made: go by the sizes seen.
                widest = max([self._widest, *(part[0].size for part in parts)])
                size = int(np.clip(CACHED // widest, 1, size))
            for result, part in zip(results, parts, strict=True):
                result[start : start + len(rows)] = part
            start += len(rows)
        return results


def known_at_draws(
    known: Mapping[Variable, AnyArray], n_draws: int
) -> tuple[Variable, dict[Variable, Variable], Array]:
    """Return a flat vector whose first element is 0, variables as parts of it, and draws of it, (n_draws, n)."""
    ends = np.cumsum([1, *(array[0].size for array in known.values())])
    flat = pt.vector("known", dtype="float64", shape=(int(ends[-1]),))
    draws, parts = np.zeros((n_draws, int(ends[-1]))), {}
    for (var, array), start, end in zip(known.items(), ends[:-1], ends[1:], strict=True):
        draws[:, start:end] = array.reshape(len(array), -1)
        parts[var] = pt.cast(flat[start:end].reshape(array.shape[1:]), var.type.dtype)
    return flat, parts, draws


def at_known(
    model: pm.Model,
    known: Mapping[Variable, AnyArray],
    n_draws: int,
    make: Callable[[Mapping[Variable, Variable]], list[Variable]],
) -> tuple[OnDraws, Array]:
    """Return the function of what is made of variables that are known, and the draws of these at which to evaluate."""
    flat, parts, draws = known_at_draws(known, n_draws)
    with without_c():
        outputs = graph.simplify(drawn_anew(make(parts), flat[0]), check_bounds=model.check_bounds)
        return OnDraws(model, flat, outputs), draws


def drawn_anew(outputs: list[Variable], zero: Variable) -> list[Variable]:
    """Return outputs all of whose random numbers depend on a variable that is 0.

    It is added to the first parameter: PyTensor goes by that one when it vectorises.
    """
    fgraph = copy_of(inline_inner_graphs(outputs))
    for node in fgraph.toposort():
        if isinstance(node.op, BernoulliRV):  # which SciPy draws, in four times as long
            rng, size, p = node.inputs
            next_rng, draw = uniform.make_node(rng, size, pt.zeros_like(p), pt.ones_like(p)).outputs
            new = (next_rng, pt.cast(draw < p, node.outputs[1].type.dtype))
            fgraph.replace_all(list(zip(node.outputs, new, strict=True)), import_missing=True)
    for node in fgraph.toposort():
        if isinstance(node.op, RandomVariable):
            first = len(node.inputs) - len(node.op.ndims_params)
            parameter = node.inputs[first]
            fgraph.change_node_input(node, first, parameter + pt.cast(zero, parameter.type.dtype), import_missing=True)
    return list(fgraph.outputs)
