"""Log p in which the rows of an observed variable have weights, 0 or 1: with them, rows are left out."""

import functools

from collections.abc import Sequence

import numpy as np
import pymc as pm

from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor import shared
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from scipy import sparse

from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import Dependences, Factor, factors_of

# --- the log density of an observed variable, observation by observation, at draws ---


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
        size = max(1, STREAMED // max(cost.estimate([self._logp]).widest, 1))
        with np.errstate(all="ignore"):
            parts = [np.asarray(self._function(theta[i : i + size])[0]) for i in range(0, len(theta), size)]
        shape = (len(theta), *self.shape)
        whole = np.concatenate([np.broadcast_to(part, (len(part), *shape[1:])) for part in parts])
        return np.asarray(whole, dtype=np.float64).reshape(len(theta), -1)

    def dependence(self) -> sparse.csr_array:
        """Return which coordinates each observation depends on, (n_rows, n_dim): True where it does."""
        depends = Dependences(self._facts, self._theta).of(self._logp)
        return sparse.csr_array(depends.sets[depends.index.ravel()])


#: Difference of two log densities that is rounding.
_ROUNDING = 1e-9


class MaskedDensity:
    """The log density of a model whose factor of an observed variable has a weight for each row.

    Raises ValueError where log p is another one than that of ``given`` while all weights are 1.
    """

    def __init__(self, given: LogDensity, rows: ObservedLogp) -> None:
        self.name, self._given, self._shape = rows.name, given, rows.shape
        self._weights = shared(np.ones(self._shape), name=f"weights of {self.name}", shape=self._shape)

    @functools.cached_property
    def density(self) -> LogDensity:
        """Log p, whose weights change with `leave_out`."""
        self.leave_out(np.empty(0, dtype=np.intp))
        density = LogDensity(self._given.model, factors=self._factors)
        points = density.initial_point() + 0.5 * np.random.default_rng(0).standard_normal((2, density.n_dim))
        logp, of_model = density.logp(points), self._given.logp(points)
        if not np.allclose(logp, of_model, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True):
            raise ValueError(
                f"Rows of {self.name!r} can't be left out: with a weight of 1 for each, log p is {logp[0]:.6g} near "
                f"the start, and {of_model[0]:.6g} in the model. Fit the model without these rows."
            )
        return density

    def _factors(self, model: pm.Model) -> Sequence[Factor]:
        return [self._weighted(factor) if factor.name == self.name else factor for factor in factors_of(model)]

    def _weighted(self, factor: Factor) -> Factor:
        """Return a factor that goes for a Potential, as it is the log density of no distribution."""
        logp = self._weights * factor.logp
        logp.name = self.name
        return Factor(logp, "potential", logp)

    def leave_out(self, rows: AnyArray) -> None:
        """Give some observations, numbered in one row, a weight of 0, and all others one of 1."""
        weights = np.ones(self._shape)
        weights.reshape(-1)[rows] = 0.0
        self._weights.set_value(weights)
