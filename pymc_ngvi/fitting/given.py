"""What a fit is given: a model, shards in its place, or a model whose data come in batches; and its log density."""

import logging

from collections.abc import Iterable, Mapping
from weakref import WeakValueDictionary

import pymc as pm

from numpy.typing import ArrayLike
from pymc.model import modelcontext

from pymc_ngvi.density import CannotReuse, LogDensity, ModelDensity
from pymc_ngvi.density.shards.density import ShardedDensity
from pymc_ngvi.density.shards.shards import Shards
from pymc_ngvi.density.streams.density import StreamDensity, Streamed
from pymc_ngvi.density.streams.source import BatchSource

logger = logging.getLogger("pymc.ngvi")
#: Of models, by identity, for as long as the result of a fit holds them: the next fit builds nothing anew.
_BUILT: WeakValueDictionary[int, LogDensity] = WeakValueDictionary()

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


def density_of(
    model: pm.Model | Shards | Streamed,
    last: ModelDensity | None,
    backend: str,
    compile_kwargs: Mapping[str, object] | None,
) -> ModelDensity:
    """Return the log density for the next fit: what was built for the last one serves again, where it can.

    Parameters
    ----------
    model : pymc.Model, Shards or Streamed
    last : ModelDensity or None
        Of the last fit, perhaps of another model.
    backend, compile_kwargs
        As of `LogDensity`.
    """
    if isinstance(model, Shards):
        return ShardedDensity(model, backend, compile_kwargs)
    if isinstance(model, Streamed):
        return StreamDensity(model, backend, compile_kwargs)
    last = last or _BUILT.get(id(model))
    density, factors = None, None
    if isinstance(last, LogDensity) and last.given is model:
        factors = last.factors_from
        try:
            density = last.again(backend, compile_kwargs)
        except CannotReuse as reason:
            logger.info(f"The functions of the model are built anew: {reason}.")
    density = density or LogDensity(model, backend, compile_kwargs, factors=factors)
    if factors is None:  # others are not those of the model
        _BUILT[id(model)] = density
    return density
