"""What ends a call before its time, and what it keeps: Ctrl-C, lost data, an exception in one of several posteriors."""

import contextlib
import dataclasses
import logging
import os

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, cast

from pymc_ngvi.core.refusal import Failed, Reason, Refused
from pymc_ngvi.core.status import StartError, Status
from pymc_ngvi.density.shards.errors import BrokenExecutorError, ShardError
from pymc_ngvi.density.streams.density import BatchError
from pymc_ngvi.fitting.record import FitRecord

logger = logging.getLogger("pymc.ngvi")

#: Data that can't be had any more: a fit may go on after these.
LOST = (ShardError, BrokenExecutorError, BatchError)
#: What is raised wherever it comes from: it says what the user has to do, or that there is no going on.
_RAISED = (Refused, StartError, MemoryError, *LOST)
#: Environment variable; where it is set, as in tests, an exception in one of several posteriors is raised.
RAISE = "PYMC_NGVI_RAISE"


class HasRecord(Protocol):
    """An approximation, as far as it is needed here."""

    record: FitRecord | None


class SoFar[A: HasRecord]:
    """The context of a call: Ctrl-C ends it with what there is by then, or is raised where there is nothing yet.

    After lost data, the error is raised with what there is as its ``approx``.
    """

    #: What the call returns.
    result: A

    def __init__(self) -> None:
        self._now: Callable[[], tuple[A, tuple[str, ...]]] | None = None
        self._will_do = False

    def is_now(self, now: Callable[[], tuple[A, tuple[str, ...]]], *, will_do: bool = False) -> None:
        """Say how to get what there is from here on, and what is not done yet, in noun phrases.

        Whether it will do: an exception in what is to make it better is no reason to lose it.
        """
        self._now, self._will_do = now, will_do

    def __enter__(self) -> Self:
        """Begin the call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the call."""
        if error is None or self._now is None:
            return False
        if isinstance(error, LOST):
            error.approx = self._now()[0]
            return False
        if isinstance(error, KeyboardInterrupt):
            approx, undone = self._now()
            record = cast(FitRecord, approx.record)
            if record.status is Status.NOT_STARTED:
                return False
            record = dataclasses.replace(record, status=Status.INTERRUPTED, status_before=record.status)
        elif self._will_do and isinstance(error, Exception) and not isinstance(error, MemoryError):
            said = _told("What was to come after this posterior", "It is kept.", error, logging.WARNING)
            approx, undone = self._now()
            record, undone = cast(FitRecord, approx.record), (f"{', '.join(undone)} ({said})",)
        else:
            return False
        approx.record = dataclasses.replace(record, undone=(*record.undone, *undone))
        self.result = approx
        return True


def _told(what: str, then: str, error: Exception, level: int) -> str:
    """Log an exception that does not end a call, and return its type and message; raise it in tests."""
    if os.environ.get(RAISE) and not isinstance(error, _RAISED):
        raise error
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
    logger.log(level, f"{what} failed ({said}). {then} Please report this; the log has the traceback at level DEBUG.")
    logger.debug(f"{what} failed.", exc_info=error)
    return said


@contextlib.contextmanager
def spared(what: str, then: str, level: int = logging.WARNING) -> Iterator[None]:
    """Turn an exception in a part of a fit into `Failed`, and warn of it, so that the fit goes on without that part.

    It is raised where the environment variable `RAISE` is set, which tests do.
    """
    try:
        yield
    except _RAISED:
        raise
    except Exception as error:  # whatever it is
        raise Failed(Reason.EXCEPTION, _told(what, then, error, level)) from error


@contextlib.contextmanager
def or_the_first(before: Sequence[BaseException]) -> Iterator[None]:
    """Raise the first of some exceptions in the place of the last one, with the others as notes."""
    try:
        yield
    except Exception as last:
        if not before or isinstance(last, _RAISED):
            raise
        first, *others = [*before, last]
        for error in others:
            first.add_note(f"Then {type(error).__name__}: {error}")
        raise first from None
