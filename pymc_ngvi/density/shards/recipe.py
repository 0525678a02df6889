"""How shards are made, in whichever process."""

import os
import uuid

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import cloudpickle


@dataclass(frozen=True)
class Recipe:
    """How shards are made."""

    #: The function that makes the model of a key, pickled.
    build: bytes
    keys: tuple[Hashable, ...]
    #: Shards that a process keeps, at most.
    keep: int | None
    #: No other has it.
    name: str
    #: The process that asks.
    home: int
    #: Potentials that are left out.
    without: tuple[str, ...] = ()

    @classmethod
    def of(cls, build: Callable[..., object], keys: Sequence[Hashable], keep: int | None) -> "Recipe":
        """Return a new one."""
        try:
            pickled = cloudpickle.dumps(build)
        except Exception as error:
            raise TypeError(
                f"build={build!r} can't be sent to other processes ({type(error).__name__}: {error}): let it open what "
                "it needs by itself."
            ) from error
        return cls(pickled, tuple(keys), keep, uuid.uuid4().hex, os.getpid())

    @property
    def is_home(self) -> bool:
        """Whether this is the process that asks."""
        return os.getpid() == self.home
