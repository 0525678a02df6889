"""Log p and its gradient at many points: by rows where these are all of it, by compiled functions elsewhere."""

import functools

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.by_rows import NOT_LOG_P, ByRows
from pymc_ngvi.density.expectations import Pointwise
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.jets import Jets
from pymc_ngvi.graphs.loops import draws_in_call
from pymc_ngvi.ops import cost

#: Elements of a temporary in one batch: more than the cache has, as most temporaries of a model are smaller.
_BATCH_ELEMENTS = 4 * CACHED_ELEMENTS
#: Points in one batch at most: of so many, calls take less time than their work even in small models.
_MOST_POINTS = 256
#: Estimated seconds of evaluating gradients, beyond which a function for log p alone is compiled.
_LOGP_SECONDS = 0.5
#: Elements of the largest intermediate times the dimension, below which one thread does best.
_SMALL = 1_000_000
#: Relative difference of two values of log p that may be rounding, wherever points are.
_APART = 1e-6
#: Backends that read rows as programs: no function of log p is compiled where rows give it.
_ROWS_ARE_READ = ("quick", "jax")
#: Times that log p and its gradient take of log p alone: the median of the users' battery, by the graphs of both.
_OF_LOGP = 1.9
#: NumPy passes over the elements of a node of the gradient's graph, most of which have several inputs of as many
#: elements: the median of models without rows.
_PASSES = 2


class Evaluations:
    """Evaluates log p and its gradient, many points in a call."""

    def __init__(self, graphs: FlatGraphs, functions: Functions, by_rows: ByRows) -> None:
        self._graphs, self._functions, self._by_rows = graphs, functions, by_rows
        self._n_by_rows = 0

    def see_to_gradient(self) -> None:
        """Make the graph of the gradient where rows don't give it; raise MissingDerivativeError if there is none."""
        if self._graphs.forward is None and self._pointwise is None:
            self._graphs.raw_grad  # noqa: B018 (made once)

    @property
    def _pointwise(self) -> Pointwise | None:
        """Log p by rows; None where a graph serves."""
        is_compiled = self._functions.backend_of_rows not in _ROWS_ARE_READ
        return None if is_compiled or self._graphs.forward is not None else self._by_rows.pointwise

    @functools.cached_property
    def batch_size(self) -> int:
        """Points evaluated in one call."""
        widest = max(self._graphs.cost.widest, 1)
        in_cache = int(np.clip(_BATCH_ELEMENTS // widest, 1, _MOST_POINTS))
        return max(in_cache, draws_in_call(widest)) if self._graphs.shares_calls else in_cache

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self._graphs.cost_of_logp.widest * self._graphs.layout.n_dim < _SMALL

    @functools.cached_property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""
        known = self._functions.made.gradient_seconds[self._pointwise is not None]
        return known.of(self._estimated_seconds)

    def _estimated_seconds(self) -> float:
        graphs = self._graphs
        if graphs.forward is not None:
            return graphs.cost.quick_seconds
        compiled = self._functions.backend not in ("quick", "c")
        if self._pointwise is not None:
            return _OF_LOGP * cost.evaluation_seconds([graphs.logp], along=graphs.theta, compiled=compiled)
        at_once = min(self.batch_size, cost.MANY)
        return cost.evaluation_seconds(
            graphs.logp_grad, batch=at_once, passes=_PASSES, along=graphs.theta, compiled=compiled
        )

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_points,), and its gradient, (n_points, n_dim)."""
        prices.count(len(theta) * self.gradient_seconds)
        rows = self._pointwise
        if rows is not None:
            logp, grad = rows.logp_grad(theta)
            if self._add_up(theta, logp):
                return logp, grad
        results = [self._batch("logp_grad", theta[rows]) for rows in slices(len(theta), self.batch_size)]
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,)."""
        prices.count(len(theta) * prices.of_value(self.gradient_seconds))
        rows = self._pointwise
        if rows is not None:
            logp = rows.logp(theta)
            if self._add_up(theta, logp):
                return logp
        # Gradients that nobody asked for cost less than compiling another function, but for much data.
        takes_long = len(theta) * self._graphs.cost.quick_seconds > _LOGP_SECONDS
        name = "logp" if takes_long or self._jets is not None else "logp_grad"
        parts = [self._batch(name, theta[rows])[0] for rows in slices(len(theta), self.batch_size)]
        return np.concatenate(parts)

    def _add_up(self, theta: Array, logp: Array) -> bool:
        """Tell whether rows add up to log p: at the best and the middle one of points, now and then.

        It is seen to at the first call, the second, fourth, eighth, ...; where they don't, they are given up.
        """
        self._n_by_rows += 1
        finite = np.flatnonzero(np.isfinite(logp))
        if self._n_by_rows & (self._n_by_rows - 1) or not len(finite):
            return True
        ranked = finite[np.argsort(logp[finite])]
        some = ranked[[-1, len(ranked) // 2]]
        is_right = bool(
            np.all(np.abs(self._by_rows.logp(theta[some]) - logp[some]) <= _APART * (1.0 + np.abs(logp[some])))
        )
        if not is_right:
            self._by_rows.give_up(NOT_LOG_P)
        return is_right

    def grad_in_one_call(self, theta: Array) -> Array:
        """Return the gradient, (n_points, n_dim), at few points."""
        rows = self._pointwise
        return self._batch("logp_grad", theta)[1] if rows is None else rows.logp_grad(theta)[1]

    def _batch(self, name: str, theta: Array) -> tuple[Array, ...]:
        made = self._functions.made
        function = self._functions.once(made.logp if name == "logp" else made.logp_grad, lambda: self.compiled(name))
        with np.errstate(all="ignore"):
            outputs = function(self._functions.filled_up(np.ascontiguousarray(theta, dtype=np.float64)))
        return tuple(np.asarray(out)[: len(theta)] for out in outputs)

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
        return self._functions.compile([draws], batched)
