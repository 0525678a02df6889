"""Functions of the free variables of a model, evaluated at many draws by one vectorised graph."""

from abc import ABC, abstractmethod

import numpy as np
import pymc as pm

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import find_rng_nodes, reseed_rngs
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.op import RNGConsumerOp

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.ops import cost

#: Elements of a temporary in one call: past this, temporaries leave the cache and NumPy slows down.
_BATCH_ELEMENTS = 2**17
_MAX_BATCH = 512
#: Draws that share the time of calls, in estimates.
_AT_ONCE = 32


class FunctionsAtDraws(ABC):
    """Evaluates functions of the value variables of a model at unconstrained draws.

    One graph for all of them, over a batch of draws, run by NumPy calls: nothing is compiled to machine code. It is
    made at the first call and reads the model's shared data when it is called, so that it follows ``pm.set_data``.

    Where PyTensor can't vectorise the graph, or it draws random numbers, draws are evaluated one by one.

    Attributes
    ----------
    model : pymc.Model
    layout : Layout
    """

    model: pm.Model
    layout: Layout

    @abstractmethod
    def _outputs(self) -> list[Variable]:
        """Return the functions, of the value variables."""

    def _forget(self) -> None:
        self._function: Function | None = None
        self._one_by_one = False
        self._rngs: list[Variable] = []
        self._widest = 1
        self._seconds = 0.0

    def evaluate(self, theta: Array, random_seed: int | None = None) -> list[AnyArray]:
        """Return the functions at draws, (n_draws, n_dim), each with an axis of draws in front."""
        if self._function is None:
            with without_c():
                self._compile()
        if random_seed is not None:
            reseed_rngs(self._rngs, random_seed)
        with np.errstate(all="ignore"):  # draws may overflow on the constrained scale
            return self._evaluate(theta)

    def _compile(self) -> None:
        theta = graph.flat_input(self.layout)
        outputs = self._on_flat_vector(theta)
        self._rngs = find_rng_nodes(outputs)
        draws_random_numbers = any(isinstance(node.op, RNGConsumerOp) for node in toposort(outputs))
        self._widest = cost.estimate(outputs).widest
        self._seconds = cost.evaluation_seconds(outputs, batch=1 if draws_random_numbers else _AT_ONCE)
        if draws_random_numbers:
            # Vectorised, a random number that does not depend on theta would be the same in every draw.
            self._compile_one_by_one(theta, outputs)
            return
        try:
            draws, batched = graph.over_draws(outputs, theta)
            self._function = self._compile_function(draws, batched)
        except Exception:  # whatever PyTensor raises for an Op that it can't vectorise: draw by draw always works
            self._compile_one_by_one(theta, outputs)

    def _on_flat_vector(self, theta: Variable) -> list[Variable]:
        outputs = graph.on_flat_vector(self.model, self.layout, self._outputs(), theta)
        return graph.simplify(outputs, check_bounds=self.model.check_bounds)

    def _compile_one_by_one(self, theta: Variable, outputs: list[Variable]) -> None:
        self._function = self._compile_function(theta, outputs)
        self._one_by_one = True

    def _compile_function(self, argument: Variable, outputs: list[Variable]) -> Function:
        with self.model:
            function: Function = pymc_compile(
                [argument], outputs, on_unused_input="ignore", trust_input=True, mode=quick_mode()
            )
        return function

    def _evaluate(self, theta: Array) -> list[AnyArray]:
        if self._one_by_one:
            return _stack(self._function, theta)
        try:
            return self._evaluate_batches(theta)
        except Exception:
            # Some vectorised graphs compile and then fail. If the plain graph fails too, its message is the clearer.
            vectorised = self._function
            flat = graph.flat_input(self.layout)
            with without_c():
                self._compile_one_by_one(flat, self._on_flat_vector(flat))
            try:
                return _stack(self._function, theta)
            except Exception:
                self._function, self._one_by_one = vectorised, False  # the data may be put right again
                raise

    def _evaluate_batches(self, theta: Array) -> list[AnyArray]:
        assert self._function is not None
        size = int(np.clip(_BATCH_ELEMENTS // max(self._widest, 1), 1, _MAX_BATCH))
        results: list[AnyArray] = []
        start = 0
        while start < len(theta):
            rows = np.ascontiguousarray(theta[start : start + size], dtype=np.float64)
            parts = [np.asarray(part) for part in self._function(rows)]
            if not results:
                results = [np.empty((len(theta), *part.shape[1:]), part.dtype) for part in parts]
                # The data may have grown since the graph was made: go by the sizes seen.
                widest = max([self._widest, *(part[0].size for part in parts)])
                size = int(np.clip(_BATCH_ELEMENTS // widest, 1, size))
            for result, part in zip(results, parts, strict=True):
                result[start : start + len(rows)] = part
            start += len(rows)
        return results


def _stack(function: Function | None, theta: Array) -> list[AnyArray]:
    """Evaluate draw by draw and stack the results."""
    assert function is not None
    draws = [[np.asarray(out) for out in function(np.ascontiguousarray(row))] for row in theta]
    return [np.stack(column) for column in zip(*draws, strict=True)]
