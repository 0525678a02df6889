"""The log density of an observed variable, observation by observation, at draws."""

import functools

import numpy as np

from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from scipy import sparse

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.dependence import Dependences

#: Numbers in one call.
_AT_ONCE = 2**20


class ObservedLogp:
    """Log densities of the observations of a variable, functions of theta."""

    def __init__(self, density: LogDensity, name: str) -> None:
        self.name, self._density, self._theta = name, density, density.graphs.theta
        [factor] = [factor for factor in density.graphs.factors if factor.name == name]
        if isinstance(getattr(factor.variable.owner, "op", None), MinibatchRandomVariable):
            raise ValueError(f"{name!r} is scaled by total_size: its rows are a part of the data only.")
        with without_c():
            graphs = density.graphs
            [logp] = graph.inline_inner_graphs(list(graphs.simplify(graphs.on_flat_vector([factor.logp]))))
        self._logp: Variable = logp

    @functools.cached_property
    def _facts(self) -> Facts:
        with without_c():
            return Facts(self._logp, self._theta)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the log density."""
        return self._facts.shape(self._logp)

    @functools.cached_property
    def _function(self) -> Function:
        with without_c():
            draws, batched = graph.over_draws([self._logp], self._theta)
        return self._density.functions.compile([draws], batched)

    def __call__(self, theta: Array) -> Array:
        """Return log densities, (n_draws, n_rows), at the rows of ``theta``."""
        size = max(1, _AT_ONCE // max(cost.estimate([self._logp]).widest, 1))
        with np.errstate(all="ignore"):
            parts = [np.asarray(self._function(theta[i : i + size])[0]) for i in range(0, len(theta), size)]
        shape = (len(theta), *self.shape)
        whole = np.concatenate([np.broadcast_to(part, (len(part), *shape[1:])) for part in parts])
        return np.asarray(whole, dtype=np.float64).reshape(len(theta), -1)

    def dependence(self) -> sparse.csr_array:
        """Return which coordinates each observation depends on, (n_rows, n_dim): True where it does."""
        depends = Dependences(self._facts, self._theta).of(self._logp)
        return sparse.csr_array(depends.sets[depends.index.ravel()])
