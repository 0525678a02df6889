"""The initial point of a model, as a function that can be called again when the data have changed."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pymc as pm

from pymc.initial_point import make_initial_point_fn
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Variable
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.backends import without_c

#: Of initial values that are drawn from the prior.
_SEED = 0


def initial_point_function(
    model: pm.Model, overrides: Mapping[Variable | str, object] | None = None
) -> Callable[[], dict[str, AnyArray]]:
    """Return a function that gives the initial point by value name, unconstrained, for the data as they are then."""
    with without_c(model):
        function = make_initial_point_fn(model=_for_initial_points(model), overrides=overrides, jitter_rvs=set())

    def initial_point() -> dict[str, AnyArray]:
        with without_c(model):
            return dict(function(_SEED))

    return initial_point


def _for_initial_points(model: pm.Model) -> pm.Model | SimpleNamespace:
    """Return what PyMC reads of a model, with transforms of `pymc.dims` that take the plain arrays it hands them."""
    transforms = model.rvs_to_transforms
    named = {rv: t for rv, t in transforms.items() if t is not None and isinstance(rv.type, XTensorType)}
    if not named:
        return model
    return SimpleNamespace(
        free_RVs=model.free_RVs,
        rvs_to_initial_values=model.rvs_to_initial_values,
        rvs_to_transforms={**transforms, **{rv: _OfArrays(t, rv.type.dims) for rv, t in named.items()}},
    )


class _OfArrays:
    """A transform of variables with named dimensions, for values without."""

    def __init__(self, transform: Transform, dims: tuple[str, ...]) -> None:
        self.name = transform.name
        self.backward, self._transform, self._dims = transform.backward, transform, dims

    def forward(self, value: Variable, *inputs: Variable) -> Variable:
        """Transform a value to the unconstrained scale."""
        if not isinstance(value.type, XTensorType):
            value = as_xtensor(value, dims=self._dims)
        return self._transform.forward(value, *inputs)
