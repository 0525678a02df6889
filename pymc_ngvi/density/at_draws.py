"""Functions of the free variables of a model, evaluated at unconstrained draws."""

from abc import ABC, abstractmethod

import pymc as pm

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.op import RNGConsumerOp

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.on_draws import OnDraws
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout


class FunctionsAtDraws(ABC):
    """Evaluates functions of the value variables of a model at unconstrained draws, by `OnDraws`.

    What evaluates them is made at the first call and reads the model's shared data when it is called, so that it
    follows ``pm.set_data``. Where they draw random numbers, draws are evaluated one by one.
    """

    model: pm.Model
    layout: Layout

    @abstractmethod
    def _outputs(self) -> list[Variable]:
        """Return the functions, of the value variables."""

    def _forget(self) -> None:
        self._function: OnDraws | None = None

    def compiled(self) -> OnDraws:
        """Return what evaluates them: made once."""
        if self._function is None:
            with without_c():
                theta = graph.flat_input(self.layout)
                outputs = graph.on_flat_vector(self.model, self.layout, self._outputs(), theta)
                outputs = graph.simplify(outputs, check_bounds=self.model.check_bounds)
                # Vectorised, a random number that does not depend on theta would be the same in every draw.
                draws_random_numbers = any(isinstance(node.op, RNGConsumerOp) for node in toposort(outputs))
                self._function = OnDraws(self.model, theta, outputs, one_by_one=draws_random_numbers)
        return self._function

    def evaluate(self, theta: Array, random_seed: int | None = None) -> list[AnyArray]:
        """Return the functions at draws, (n_draws, n_dim), each with an axis of draws in front."""
        function = self.compiled()
        if random_seed is not None:
            function.reseed(random_seed)
        return function(theta)
