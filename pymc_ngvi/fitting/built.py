"""Log densities of models that were fitted already: what was built for one fit serves the next."""

import logging

from collections.abc import Mapping
from weakref import WeakValueDictionary

import pymc as pm

from pymc_ngvi.density import CannotReuse, LogDensity, ModelDensity
from pymc_ngvi.density.shards.density import ShardedDensity
from pymc_ngvi.density.shards.shards import Shards
from pymc_ngvi.density.streams.density import StreamDensity, Streamed

logger = logging.getLogger("pymc.ngvi")
#: Of models, by identity, for as long as the result of a fit holds them: the next fit builds nothing anew.
_BUILT: WeakValueDictionary[int, LogDensity] = WeakValueDictionary()


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
    density = None
    if isinstance(last, LogDensity) and last.model is model:
        try:
            density = last.again(backend, compile_kwargs)
        except CannotReuse as reason:
            logger.info(f"The functions of the model are built anew: {reason}.")
    density = density or LogDensity(model, backend, compile_kwargs)
    _BUILT[id(model)] = density
    return density
