"""The progress bar: PyMC's look, a few columns of numbers, at most 20 updates a second."""

import functools
import threading
import time

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from pymc.progress_bar import CustomProgress, default_progress_theme
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.theme import Theme
from threadpoolctl import ThreadpoolController

from pymc_ngvi.core.messages import logger
from pymc_ngvi.core.prices import in_words
from pymc_ngvi.core.status import format_elbo, format_gap
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.shards import ShardedDensity
from pymc_ngvi.fitting.loop import LoopState

# --- the progress bar: PyMC's look, a few columns of numbers, at most 20 updates a second ---


_SECONDS_BETWEEN_UPDATES = 0.05
#: Seconds of other work than a fit after which it shows how far it is.
_SECONDS_UNSEEN = 2.0
#: Estimated seconds from which on the log says what is being done.
_SECONDS_SAID = 10.0
#: Headers, and the field that each shows.
_COLUMNS = {
    "Iteration": "iteration",
    "ELBO (nats)": "elbo",
    "Nats to gain": "gap",
    "Draws": "draws",
    "Step size": "step",
    "Shards": "shards",
}


class FitProgress:
    """A line that shows where a fit is; the number of iterations is not known in advance, so it has no bar."""

    def __init__(self, enabled: bool = True, theme: Theme | None = None) -> None:
        columns = {
            key: TextColumn(
                f"{{task.fields[{key}]}}",
                justify="right",
                table_column=Column(header, justify="right", no_wrap=True),
            )
            for header, key in _COLUMNS.items()
        }
        self._of_draws, self._of_shards, self._has_shards = columns["draws"], columns["shards"], False
        self._progress = CustomProgress(
            SpinnerColumn(),
            *columns.values(),
            TimeElapsedColumn(table_column=Column("Elapsed", no_wrap=True)),
            console=console_for(theme or default_progress_theme)[0],
            disable=not enabled,
            include_headers=True,
        )
        self._columns = self._progress.columns
        self._task = TaskID(0)
        self._updated = 0.0

    def __enter__(self) -> Self:
        """Show the line."""
        self._progress.start()
        fields = dict.fromkeys(_COLUMNS.values(), "") | {"iteration": "compiling"}
        self._task = self._progress.add_task("ngvi", total=None, **fields)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the line as it is."""
        self._progress.stop()

    def update(self, state: LoopState, *, last: bool = False) -> None:
        """Show the state of the fit, unless it was shown a moment ago."""
        now = time.monotonic()
        if not last and now - self._updated < _SECONDS_BETWEEN_UPDATES:
            return
        self._updated = now
        rule = state.rule
        # Expectations that are exact take no draws.
        unused = {c for c, used in ((self._of_draws, rule.n_draws), (self._of_shards, self._has_shards)) if not used}
        self._progress.columns = tuple(c for c in self._columns if c not in unused)
        self._progress.update(
            self._task,
            completed=state.n_iterations,
            total=state.n_iterations if last else None,
            iteration=f"{state.n_iterations:,}",
            elbo=format_elbo(rule.elbo),
            gap=format_gap(rule.gap),
            draws=f"{rule.n_draws:,}",
            step=f"{rule.step_size:.2g}",
        )

    def show(self, what: str) -> None:
        """Show what is being done that is no iteration."""
        self._updated = time.monotonic()
        self._progress.update(self._task, iteration=what)

    def show_shards(self, done: int, total: int) -> None:
        """Show how many shards have been evaluated in this pass, unless that was shown a moment ago."""
        self._has_shards = True
        now = time.monotonic()
        if now - self._updated >= _SECONDS_BETWEEN_UPDATES or done == total:
            self._updated = now
            self._progress.update(self._task, shards=f"{done:,} of {total:,}")


def watching(density: ModelDensity, progress: FitProgress) -> AbstractContextManager[object]:
    """Show how many shards are done, where there are any."""
    if not isinstance(density, ShardedDensity):
        return nullcontext()
    return density.shards.watched(progress.show_shards)


@contextmanager
def announced(what: str, seconds: float, shown: bool = True) -> Iterator[None]:
    """Say what is being done and about how long it takes, in estimated seconds, while it is done.

    The log has a line where it is long; a terminal or notebook shows a clock beside it from two seconds on.
    """
    text = f"{what}: {in_words(seconds)}"
    if seconds >= _SECONDS_SAID:
        logger.info(f"{text}.")
    console, in_text = console_for(default_progress_theme)
    if not shown or in_text or seconds < _SECONDS_UNSEEN or not (console.is_terminal or console.is_jupyter):
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def console_for(theme: Theme) -> tuple[Console, bool]:
    """Return a console, and whether it is that of a notebook that can show no more than text.

    Rich takes widgets for lines that change in a notebook, and warns at each of them where ipywidgets is missing.
    """
    console = Console(theme=theme)
    in_text = console.is_jupyter and find_spec("ipywidgets") is None
    return (Console(theme=theme, force_jupyter=False) if in_text else console), in_text


# --- contexts that change what all threads of a process share ---


class SharedContext:
    """A context that the first thread that needs it enters, and the last one leaves.

    Each for itself would save what another one has changed, and leave that behind.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._lock, self._n_inside = make, threading.Lock(), 0
        self._context: AbstractContextManager[object]

    def __enter__(self) -> None:
        """Enter it, unless a thread is inside."""
        with self._lock:
            if not self._n_inside:
                context = self._make()
                context.__enter__()
                self._context = context
            self._n_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it, if no other thread is inside; errors pass."""
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._context.__exit__(None, None, None)


# --- how many threads linear algebra may take ---


def few_threads(density: ModelDensity) -> AbstractContextManager[object]:
    """Keep BLAS to one thread where waking others takes longer than the work.

    Small models are such, and sums over rows of any size: their products are many and thin, one for each part of the
    rows that fits in the cache.
    """
    return ONE_THREAD if density.is_small or density.by_rows.are_known else nullcontext()


#: Sets threads: looking for the libraries takes longer than some fits of one iteration.
_controller = functools.cache(ThreadpoolController)
#: Keeps BLAS to one thread, for the same bits wherever it is: how it sums hangs on their number.
ONE_THREAD = SharedContext(lambda: _controller().limit(limits=1, user_api="blas"))
