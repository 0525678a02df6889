"""Tags: the names that files have for classes, so that a class can be moved or renamed and old files still load."""

import dataclasses

from collections.abc import Callable
from enum import Enum
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stored:
    """A class that a file may hold."""

    #: Its name in files.
    tag: str
    cls: type
    #: Attributes that a file keeps.
    content: tuple[str, ...]
    #: Takes these by keyword.
    make: Callable[..., Any]

    def fields(self, value: object) -> dict[str, Any]:
        """Return what a file keeps of an instance."""
        return {name: getattr(value, name) for name in self.content}


#: All classes by tag, and the entries of classes.
BY_TAG: dict[str, Stored] = {}
BY_CLASS: dict[type, Stored] = {}


def stored[T: type](tag: str, *, content: tuple[str, ...] | None = None, make: str | None = None) -> Callable[[T], T]:
    """Let files hold instances of the decorated class.

    Subclasses are not included: each has a tag of its own, or none.
    """

    def register(cls: T) -> T:
        taken = BY_TAG.get(tag)
        if taken is not None and _path(taken.cls) != _path(cls):  # a module that is reloaded makes its class again
            raise ValueError(f"The tag {tag!r} of {_path(cls)} is that of {_path(taken.cls)}: give it another one.")
        entry = Stored(tag, cls, _content(cls) if content is None else content, getattr(cls, make) if make else cls)
        BY_TAG[tag] = BY_CLASS[cls] = entry
        return cls

    return register


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _content(cls: Any) -> tuple[str, ...]:
    if issubclass(cls, Enum):
        return ()
    if "__dataclass_params__" in vars(cls):  # its own decorator: a subclass may have another constructor
        return tuple(f.name for f in dataclasses.fields(cls))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return tuple(cls._fields)
    raise TypeError(f"{_path(cls)} is no dataclass, NamedTuple or Enum: say what its content is.")
