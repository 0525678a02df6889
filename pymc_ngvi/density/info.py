"""What is known of a model beside its log density: names, places in the flat vector, data, start, prior."""

import contextlib
import warnings

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pymc as pm

from pymc.initial_point import make_initial_point_fn
from pymc.logprob.transforms import Transform
from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout

# --- the initial point of a model, as a function that can be called again when the data have changed ---


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


# --- the data of a model: whether they are still what they were, and log p given those of then ---


class DataSnapshot:
    """Remembers the data that a model had, to tell later whether it was changed."""

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._take()

    def _take(self) -> None:
        """Remember the data as they are now."""
        self._arrays: dict[str, AnyArray] = {
            var.name: var.get_value(borrow=True) for var in self._model.data_vars if hasattr(var, "get_value")
        }
        # Lengths of dims follow the data.
        self._lengths: dict[str, AnyArray] = {
            name: var.get_value(borrow=True)
            for name, var in self._model.dim_lengths.items()
            if hasattr(var, "get_value")
        }

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were."""
        return [
            name
            for name, then in self._arrays.items()
            if (now := self._model[name].get_value(borrow=True)) is not then and not np.array_equal(now, then)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        model = self._model
        pairs = [(model[name], then) for name, then in self._arrays.items()]
        pairs += [(model.dim_lengths[name], then) for name, then in self._lengths.items()]
        moved = [(var, then, now) for var, then in pairs if (now := var.get_value(borrow=True)) is not then]
        try:
            for var, then, _ in moved:
                var.set_value(then, borrow=True)
            yield
        finally:
            for var, _, now in moved:
                var.set_value(now, borrow=True)


# --- draws of the prior on the unconstrained scale: dispersed points from which modes can be looked for ---

#: What PyMC and PyTensor raise where a prior can't be drawn from.
_CAN_NOT = (NotImplementedError, RuntimeError, ValueError, TypeError)


class Prior:
    """Draws of the prior of a model, by one function for all fits of it: it reads the data as they are when called."""

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._function: Callable[[], list[Array]] | None = None
        self._generators: list[SharedVariable] = []

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the function is compiled again when it is needed."""
        return {"_model": self._model, "_function": None, "_generators": []}

    def draws(self, layout: Layout, n_draws: int, seed: int) -> Array:
        """Return draws, the same as those of `pymc.draw` with this seed."""
        try:
            with without_c(self._model), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of draws that are not finite
                if self._function is None:
                    self._compile(layout)
                assert self._function is not None
                reseed_rngs(self._generators, seed)
                drawn = list(zip(*(self._function() for _ in range(n_draws)), strict=True))
        except _CAN_NOT:
            return np.empty((0, layout.n_dim))
        flat = np.concatenate([np.asarray(d, dtype=np.float64).reshape(n_draws, -1) for d in drawn], axis=1)
        return flat[np.isfinite(flat).all(axis=1)]

    def _compile(self, layout: Layout) -> None:
        values: list[Variable] = []
        for v in layout.variables:
            rv = self._model[v.name]
            transform = self._model.rvs_to_transforms[rv]
            values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
        function, updates = pymc_compile([], values, random_seed=False, mode="FAST_COMPILE", return_updates=True)
        self._function, self._generators = function, list(updates)


# --- what is known of a model beside its log density: names, places in the flat vector, data, start, prior ---


@dataclass(frozen=True)
class ModelInfo:
    """A model at the time when its log density was made."""

    model: pm.Model
    #: Where each variable is in the flat vector, with names, shapes, dims and coords.
    layout: Layout
    #: The data that the model had.
    data: DataSnapshot
    #: The model's initial point, flat and unconstrained; shape (n_dim,).
    start: Array
    #: Makes draws of the prior.
    prior: Prior

    @classmethod
    def of(cls, model: pm.Model, point: dict[str, AnyArray], prior: Prior | None = None) -> "ModelInfo":
        """Return what is known of a model now.

        Its initial point is given, by unconstrained values, and what drew from its prior before, if anything did.
        """
        layout = Layout.from_model(model, point)
        return cls(model, layout, DataSnapshot(model), layout.flatten(point), prior or Prior(model))

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.layout.n_dim

    def prior_draws(self, n_draws: int, seed: int) -> Array:
        """Draw from the prior, (n, n_dim), unconstrained; fewer draws, or none, where it can't be drawn from."""
        return self.prior.draws(self.layout, n_draws, seed)


def terms_by_variable(model: pm.Model, point: Mapping[str, AnyArray]) -> dict[str, float]:
    """Return the terms of log p by the names of their variables, at a point by unconstrained values."""
    with without_c(model):
        terms: dict[str, float] = model.point_logps(dict(point), round_vals=4, mode="FAST_COMPILE")
    return terms
