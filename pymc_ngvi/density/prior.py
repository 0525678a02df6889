"""Draws of the prior on the unconstrained scale: dispersed points from which modes can be looked for."""

import warnings

from collections.abc import Callable

import numpy as np
import pymc as pm

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout

#: What PyMC and PyTensor raise where a prior can't be drawn from.
_CAN_NOT = (NotImplementedError, RuntimeError, ValueError, TypeError)


class Prior:
    """Draws of the prior of a model, by one function for all fits of it: it reads the data as they are when called.

    Parameters
    ----------
    model : pymc.Model
    """

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._function: Callable[[], list[Array]] | None = None
        self._generators: list[SharedVariable] = []

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the function is compiled again when it is needed."""
        return {"_model": self._model, "_function": None, "_generators": []}

    def draws(self, layout: Layout, n_draws: int, seed: int) -> Array:
        """Return draws, the same as those of `pymc.draw` with this seed.

        Parameters
        ----------
        layout : Layout
            Of the free variables.
        n_draws, seed : int

        Returns
        -------
        ndarray, shape (n, n_dim)
            Unconstrained. Draws that are not finite are left out; none where the prior can't be drawn from
            (``pm.Flat``).
        """
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
