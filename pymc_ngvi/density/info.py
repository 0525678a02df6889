"""What is known of a model beside its log density: names, places in the flat vector, data, start, prior."""

import warnings

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pymc as pm

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.data import DataSnapshot
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout

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
