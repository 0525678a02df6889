"""Fits outside this process: what is sent there, and what is done where a process ends."""

import threading

from collections.abc import Callable, Generator, Iterator

import cloudpickle

from pymc_ngvi.many.entries import Case
from pymc_ngvi.many.fitting import Fitter, Row

#: Cases that are handed to each process at a time: what is waiting takes memory.
IN_HAND = 2
#: Said of a fit whose process has ended twice, alone the second time.
_DIED = "The process ended during this fit, which may be for want of memory."

type Numbered = tuple[int, Case]
#: The place of a case, and the case, pickled.
type Sent = tuple[int, bytes]
type Rows = Generator[Row, None, list[Sent]]
#: Fits cases, all or one at a time; yields rows, and returns the cases that were lost with their process.
type Run = Callable[[Iterator[Sent], bool], Rows]


class Kit:
    """What a process fits with: made when the first case comes, and kept for the others."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._fitter: Fitter | None = None
        self._lock = threading.Lock()  # a model has the data of one fit at a time

    @classmethod
    def of(cls, fitter: Fitter) -> "Kit":
        """Return that of a fitter after its first fits; raise TypeError for a model that can't be pickled."""
        try:
            return cls(cloudpickle.dumps((fitter.asked, fitter.pilot)))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise TypeError(f"The model can't be sent to other processes: {why}. Fit it in this one.") from error

    def __reduce__(self) -> tuple[type["Kit"], tuple[bytes]]:
        return Kit, (self.content,)

    def row(self, index: int, case: bytes) -> Row:
        """Fit a case that was pickled."""
        with self._lock:
            if self._fitter is None:
                self._fitter = Fitter(*cloudpickle.loads(self.content))
            loaded: Case | str = cloudpickle.loads(case)
            return failed(self._fitter, index, loaded) if isinstance(loaded, str) else self._fitter.row(index, loaded)


def fit_elsewhere(fitter: Fitter, cases: Iterator[Numbered], run: Run) -> Iterator[Row]:
    """Fit cases in other processes; rows come in the order in which they are done.

    A process that ends takes no other fit with it: cases that were lost are fitted again, one at a time.
    """
    left = ((index, _pickled(case)) for index, case in cases)
    while lost := (yield from run(left, False)):
        for index, case in lost:
            if (yield from run(iter([(index, case)]), True)):
                yield failed(fitter, index, _DIED)


def failed(fitter: Fitter, index: int, why: str | Exception) -> Row:
    """Return the row of a case that was not fitted."""
    text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return Row(index, fitter.asked.seed(index), error=text)


def _pickled(case: Case) -> bytes:
    """Return what to send: a case, or why it can't be."""
    content: bytes
    try:
        content = cloudpickle.dumps(case)
    except Exception as error:
        content = cloudpickle.dumps(f"The data can't be sent to another process: {type(error).__name__}: {error}")
    return content
