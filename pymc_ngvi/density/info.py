"""What is known of a model beside its log density: names, places in the flat vector, data, start, prior."""

from collections.abc import Mapping
from dataclasses import dataclass

import pymc as pm

from pymc_ngvi.core.values import AnyArray, Array
from pymc_ngvi.density.data import DataSnapshot
from pymc_ngvi.density.prior import Prior
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout


@dataclass(frozen=True)
class ModelInfo:
    """A model at the time when its log density was made.

    Parameters
    ----------
    model : pymc.Model
    layout : Layout
        Where each variable is in the flat vector, with names, shapes, dims and coords.
    data : DataSnapshot
        The data that the model had.
    start : ndarray, shape (n_dim,)
        The model's initial point, flat and unconstrained.
    prior : Prior
        Makes draws of the prior.
    """

    model: pm.Model
    layout: Layout
    data: DataSnapshot
    start: Array
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
