"""What a fit is given: a model, shards in its place, or a model whose data come in batches."""

from collections.abc import Iterable, Mapping

import pymc as pm

from numpy.typing import ArrayLike
from pymc.model import modelcontext

from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.shards.shards import Shards
from pymc_ngvi.density.streams.density import Streamed
from pymc_ngvi.density.streams.source import BatchSource

type Batches = Iterable[Mapping[str, ArrayLike]]


def model_given(model: pm.Model | None, shards: object, batches: Batches | None) -> pm.Model | None:
    """Return the model, given or of the context; None where there are shards in its place.

    Raises
    ------
    TypeError
        For a model or batches beside shards; for shards that are none.
    """
    if shards is None:
        return modelcontext(model)
    if not isinstance(shards, Shards):
        raise TypeError(f"shards should be pymc_ngvi.Shards(build, keys); got {shards!r}.")
    if model is not None:
        raise TypeError("Give a model or shards: these have models of their own.")
    if batches is not None:
        raise TypeError("Give shards or batches: shards read their data themselves.")
    return None


def streamed(model: pm.Model, batches: Batches, last: Streamed | None) -> Streamed:
    """Return a model with where its data come from, which stays the same while the batches do."""
    source = last.source if last is not None and last.source.given is batches else BatchSource(batches)
    return Streamed(model, source)


def check_not_empty(density: ModelDensity) -> None:
    """Raise ValueError for a model whose free variables have no elements."""
    if not density.n_dim:
        names = ", ".join(repr(v.name) for v in density.layout.variables)
        raise ValueError(f"The free variables of the model ({names}) have no elements: there is nothing to fit.")
