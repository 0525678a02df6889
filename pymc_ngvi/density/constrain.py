"""From flat unconstrained draws to the variables that users know: constrained values and Deterministics."""

from collections.abc import Collection

import numpy as np

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.at_draws import FunctionsAtDraws
from pymc_ngvi.density.model_density import ModelDensity

Values = dict[str, AnyArray]


class Constrainer(FunctionsAtDraws):
    """Evaluates free variables on their constrained scale, and Deterministics, at unconstrained draws.

    Notes
    -----
    Deterministics that read ``pm.Minibatch`` data have, in all draws, the rows of the batch that ``density`` has then.
    """

    def __init__(
        self, density: ModelDensity, *, deterministics: bool = True, names: Collection[str] | None = None
    ) -> None:
        self.model = density.model
        self.layout = density.layout
        self._minibatches = density.minibatches
        self._deterministics = deterministics
        self._left_out = {d.name for d in self.model.deterministics} - {d.name for d in density.deterministics}
        self.names = names
        self._forget()

    @classmethod
    def of(
        cls, density: ModelDensity, *, deterministics: bool = True, names: frozenset[str] | None = None
    ) -> "Constrainer":
        """Return the one that all fits share for which nothing is built anew (`LogDensity.again`)."""
        made = density.functions.once(
            density.functions.made.constrained[deterministics, names],
            lambda: cls(density, deterministics=deterministics, names=names),
        )
        assert isinstance(made, cls)
        return made

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled function is made again when it is needed."""
        return {
            "model": self.model,
            "layout": self.layout,
            "_minibatches": self._minibatches,
            "_deterministics": self._deterministics,
            "names": self.names,
            "_left_out": self._left_out,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore from a pickle."""
        self.__dict__.update(state)
        self._forget()

    def __call__(self, theta: Array, *, random_seed: int | None = None) -> Values:
        """Evaluate all variables at draws."""
        flat = self.layout.unflatten(np.ascontiguousarray(theta, dtype=np.float64))
        value_vars = [self.model.rvs_to_values[rv] for rv in self._fitted()]
        values: Values = {
            v.name: flat[v.name].astype(v.type.dtype, copy=False) for v in value_vars if self._is_wanted(v.name)
        }
        computed = self._computed_names()
        if computed:
            for name, value in zip(computed, self.evaluate(theta, random_seed), strict=True):
                # A float32 model gives float32 draws, like PyMC.
                values[name] = value.astype(self.model[name].type.dtype, copy=False)
        return values

    @property
    def seconds(self) -> float:
        """Estimated time of one draw, from the graph and the sizes of the data alone."""
        return self.compiled().seconds if self._computed_names() else 0.0

    def _fitted(self) -> list[Variable]:
        """Return the free variables, but for those that were added to the model after the fit, to be predicted."""
        names = {v.name for v in self.layout.variables}
        return [rv for rv in self.model.free_RVs if rv.name in names]

    def _is_known(self, deterministic: Variable) -> bool:
        """Tell whether a Deterministic is one of what was fitted."""
        if deterministic.name in self._left_out:
            return False
        added = set(self.model.free_RVs) - set(self._fitted())
        return not added or added.isdisjoint(ancestors([deterministic]))

    @property
    def computed(self) -> list[str]:
        """Names of what is computed: transformed variables, then Deterministics."""
        return self._computed_names()

    def _computed_names(self) -> list[str]:
        model = self.model
        transformed = [rv.name for rv in self._fitted() if model.rvs_to_transforms[rv] is not None]
        listed = transformed + [d.name for d in model.deterministics if self._deterministics and self._is_known(d)]
        return [name for name in listed if self._is_wanted(name)]

    def _is_wanted(self, name: str) -> bool:
        return self.names is None or name in self.names

    def _outputs(self) -> list[Variable]:
        model = self.model
        outputs = model.replace_rvs_by_values([model[name] for name in self._computed_names()])
        return self._minibatches.hold(outputs)
