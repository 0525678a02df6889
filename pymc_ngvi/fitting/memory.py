"""What an object has learned on the way, as numbers: the searches and differences of a reparametrised density.

An evaluation begins where the last ones have led, so that the bits of the next one depend on it. A class names the
attributes that count in ``learned``: numbers, arrays, and objects of such classes.
"""

import numpy as np


def memory_of(learner: object) -> dict[str, object]:
    """Return what an object has learned, with that of the objects in it; nothing for classes that do not learn."""
    values = {name: getattr(learner, name) for name in _learned(learner)}
    return {name: memory_of(value) if _learned(value) else value for name, value in values.items()}


def remember(learner: object, memory: dict[str, object]) -> None:
    """Put back what was learned into an object that has evaluated nothing yet."""
    for name in _learned(learner):
        if name not in memory:
            raise ValueError(f"it does not have {name!r} among what the fit had learned, {sorted(memory)}")
        held, value = getattr(learner, name), memory[name]
        if _learned(held) and isinstance(value, dict):
            remember(held, value)
        elif type(value) is not type(held) or np.shape(np.asarray(value)) != np.shape(np.asarray(held)):
            raise ValueError(f"what it remembers as {name!r} has another form")
        else:
            setattr(learner, name, value)


def _learned(learner: object) -> tuple[str, ...]:
    return getattr(type(learner), "learned", ())
