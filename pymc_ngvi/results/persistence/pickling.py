"""Approximations as pickles: by cloudpickle, whoever pickles, with what the fit needs to go on."""

import copy
import pickle

from typing import Any, Self

import cloudpickle


class Pickled:
    """The part of an approximation that is pickled."""

    _gaussian: Any

    def _resumable(self) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle; of the fit, what it needs to go on."""
        state: Any = super().__getstate__()
        return {**state, "_session": self._resumable()}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a pickle by cloudpickle: PyMC's models hold functions that pickle itself can't take."""
        return pickle.loads, (cloudpickle.dumps(self, protocol),)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let cloudpickle take instances apart: a model stays one where it is pickled beside its approximations."""
        super().__init_subclass__(**kwargs)
        cloudpickle.CloudPickler.dispatch_table[cls] = _parts

    def __copy__(self) -> Self:
        """Return an approximation that shares all parts but the fit."""
        copied = _bare(type(self))
        copied.__dict__.update(self.__dict__, _session=None)
        if copied._gaussian is not None:
            copied._gaussian = copy.copy(copied._gaussian)
        return copied


def _parts(approx: Pickled) -> tuple[Any, ...]:
    return _bare, (type(approx),), approx.__getstate__()


def _bare[T](cls: type[T]) -> T:
    return cls.__new__(cls)
