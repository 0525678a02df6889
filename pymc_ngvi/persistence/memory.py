"""What an object has learned on the way, as numbers: the searches and differences of a reparametrised density.

An evaluation begins where the last ones have led, so that the bits of the next one depend on it. What counts is what
pickling keeps of the objects below: their numbers and arrays, at any depth.
"""

import functools

from typing import Any

import numpy as np

from pymc_ngvi.reparam import Conditional, ReparametrisedDensity
from pymc_ngvi.reparam.differences import Steps

_LEARNS = (ReparametrisedDensity, Conditional, Steps)


def memory_of(learner: Any) -> dict[str, Any]:
    """Return the numbers and arrays that an object holds, with those of the objects in it; none for other classes."""
    if not isinstance(learner, _LEARNS):
        return {}
    held: dict[str, Any] = {}
    for name, value in learner.__getstate__().items():  # type: ignore[attr-defined]
        if isinstance(getattr(type(learner), name, None), functools.cached_property):
            continue  # follows from the rest
        if isinstance(value, _LEARNS):
            held[name] = memory_of(value)
        elif isinstance(value, bool | int | float | np.ndarray):
            held[name] = value
    return held


def remember(learner: Any, memory: dict[str, Any]) -> None:
    """Put numbers and arrays back into an object that has evaluated nothing yet.

    Raises
    ------
    ValueError
        If they are not those that such an object holds.
    """
    held = memory_of(learner)
    if held.keys() != memory.keys():
        raise ValueError(f"it remembers {sorted(memory)}, not {sorted(held)}")
    for name, value in memory.items():
        if isinstance(value, dict):
            remember(learner.__getstate__()[name], value)
        elif type(value) is not type(held[name]) or np.shape(value) != np.shape(held[name]):
            raise ValueError(f"what it remembers as {name!r} has another form")
        else:
            setattr(learner, name, value)
