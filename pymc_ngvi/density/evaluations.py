"""Log p and its gradient at many points."""

import functools

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.density.jets.evaluation import Jets
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.loops import draws_in_call

#: Elements of a temporary in one batch: more than the cache has, as most temporaries of a model are smaller.
_BATCH_ELEMENTS = 4 * CACHED_ELEMENTS
#: Points in one batch at most: of so many, calls take less time than their work even in small models. Of functions
#: that are compiled for one number of points, which are filled up.
_MOST_POINTS, _MOST_OF_FIXED = 256, 64
#: Estimated seconds of evaluating gradients, beyond which a function for log p alone is compiled.
_LOGP_SECONDS = 0.5
#: Elements of the largest intermediate times the dimension, below which one thread does best.
_SMALL = 1_000_000


class Evaluations:
    """Evaluates log p and its gradient, many points in a call.

    Parameters
    ----------
    graphs : FlatGraphs
    functions : Functions
    """

    def __init__(self, graphs: FlatGraphs, functions: Functions) -> None:
        self._graphs, self._functions = graphs, functions

    @functools.cached_property
    def batch_size(self) -> int:
        """Points evaluated in one call."""
        widest = max(self._graphs.cost.widest, 1)
        most = _MOST_OF_FIXED if self._functions.fixed_size else _MOST_POINTS
        in_cache = int(np.clip(_BATCH_ELEMENTS // widest, 1, most))
        return max(in_cache, draws_in_call(widest)) if self._graphs.shares_calls else in_cache

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self._graphs.cost_of_logp.widest * self._graphs.layout.n_dim < _SMALL

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_points,), and its gradient, (n_points, n_dim)."""
        results = [self._batch("logp_grad", theta[rows]) for rows in slices(len(theta), self.batch_size)]
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,)."""
        # Gradients that nobody asked for cost less than compiling another function, but for much data.
        takes_long = len(theta) * self._graphs.cost.quick_seconds > _LOGP_SECONDS
        name = "logp" if takes_long or self._jets is not None else "logp_grad"
        parts = [self._batch(name, theta[rows])[0] for rows in slices(len(theta), self.batch_size)]
        return np.concatenate(parts)

    def grad_in_one_call(self, theta: Array) -> Array:
        """Return the gradient, (n_points, n_dim), at few points."""
        return self._batch("logp_grad", theta)[1]

    def _batch(self, name: str, theta: Array) -> tuple[Array, ...]:
        n_points = len(theta)
        if self._functions.fixed_size and n_points < self.batch_size:
            theta = np.concatenate([theta, np.repeat(theta[-1:], self.batch_size - n_points, axis=0)])
        made = self._functions.made
        function = self._functions.once(made.logp if name == "logp" else made.logp_grad, lambda: self.compiled(name))
        with np.errstate(all="ignore"):
            outputs = function(np.ascontiguousarray(theta, dtype=np.float64))
        return tuple(np.asarray(out)[:n_points] for out in outputs)

    @property
    def _jets(self) -> Jets | None:
        return jets_of(self._graphs, self._functions)

    def compiled(self, name: str) -> Callable[[Array], tuple[Array, ...]]:
        """Compile a function of points, (n_points, n_dim): "logp" or "logp_grad"."""
        graphs, jets = self._graphs, self._jets
        if jets is not None:
            return jets.logp if name == "logp" else jets.logp_grad
        outputs = [graphs.logp] if name == "logp" else graphs.logp_grad
        draws, batched = graph.over_draws(outputs, graphs.theta)
        function: Callable[[Array], tuple[Array, ...]] = self._functions.compile([draws], batched)
        return function
