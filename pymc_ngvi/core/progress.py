"""What a call shows while it works: the numbers of a fit in a table, and on the line below it what is being done."""

import contextlib
import io
import logging
import sys
import time

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from pymc.progress_bar import default_progress_theme
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Task, TaskID
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from pymc_ngvi.core.messages import logger
from pymc_ngvi.core.prices import in_words

#: Seconds before anything is shown; characters of a bar.
_UNSEEN, _BAR = 0.5, 20
#: Estimated seconds from which on they are shown, and from which on the log of a script has a line.
_NAMED, _LOGGED = 2.0, 10.0
_HTML = "<pre style='overflow-x:auto;line-height:normal;font-family:Menlo,\"DejaVu Sans Mono\",monospace'>{code}</pre>"


class Display(Live):
    """The tasks of a call, the innermost last, and the numbers of a fit: in a terminal, a notebook or a file."""

    _output: Any = None

    def __init__(self, theme: Theme | None, *, has_numbers: bool) -> None:
        self.tasks: list[Task] = []
        #: Returns texts by their headers, which are as wide as any text.
        self.numbers: Callable[[], dict[str, str]] | None = None
        self.has_numbers, self._began, self._spinner = has_numbers, time.monotonic(), Spinner("dots")
        theme = theme or default_progress_theme
        console = Console(theme=theme)
        self._in_notebook = console.is_jupyter
        if self._in_notebook:
            console = Console(theme=theme, file=io.StringIO(), record=True, force_jupyter=False, force_terminal=False)
        is_seen = self._in_notebook or console.is_interactive
        super().__init__(console=console, auto_refresh=is_seen, transient=self._in_notebook)

    def start(self, refresh: bool = False) -> None:
        """Begin, with the log above the lines: Rich redirects the stream that its handlers have taken."""
        handlers = [*logging.root.handlers, *logging.getLogger("pymc").handlers]
        self._handlers: list[Any] = [h for h in handlers if getattr(h, "stream", None) is sys.stderr]
        super().start(refresh)
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def stop(self) -> None:
        """End, with the log where it was."""
        super().stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def refresh(self) -> None:
        """Show it as it is now: in a notebook by an output that changes, as it may lack the widgets that Rich takes."""
        if not self._in_notebook:
            super().refresh()
            return
        from IPython.display import display

        with self._lock:
            self.console.file = io.StringIO()
            self.console.print(self.get_renderable(), end="")
            text = self.console.export_text(clear=False)
            content = {"text/plain": text, "text/html": self.console.export_html(inline_styles=True, code_format=_HTML)}
            if self._output is not None:
                self._output.update(content, raw=True)
            elif text:
                self._output = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def get_renderable(self) -> Group:
        """Return the table, which stays at the end, and the line."""
        now, parts = time.monotonic(), list[Table | Text]()
        if self.is_started and now - self._began < _UNSEEN:
            return Group()
        clock = str(timedelta(seconds=int(now - self._began)))
        if self.numbers is not None:
            texts = self.numbers() | {"Elapsed": clock}
            columns = [Column(header, justify="right", no_wrap=True) for header in texts]
            table, clock = Table(*columns, box=SIMPLE_HEAD, show_edge=False), ""
            table.add_row(*texts.values())
            parts += [table, Text()]
        if self.is_started:
            parts[1:] = [self._line(clock)]
        return Group(*parts)

    def _line(self, clock: str) -> Text:
        """Return what is being done; where it is counted, with a bar, and what takes more than a moment."""
        tasks, bar = list(self.tasks), Text()
        of, last = next((task for task in tasks if task.total or task.completed), tasks[-1]), tasks[-1]
        text, seconds = of.description, of.elapsed or 0.0
        if of.total:
            n_full = int(_BAR * of.completed / of.total)
            bar = Text.assemble(("━" * n_full, "bar.complete"), ("━" * (_BAR - n_full), "bar.back"), " ")
        if of.total or of.completed:
            text += f": {of.completed:,}{f' of {of.total:,}' if of.total else ''}"
        if of.total and of.completed:
            clock += f", {timedelta(seconds=int(seconds * (of.total / of.completed - 1.0)))} left"
        if of is not last and (last.elapsed or 0.0) > _UNSEEN:
            clock += f" · {last.description}"
        spinner = self._spinner.render(time.monotonic())
        return Text.assemble(" ", spinner, " ", bar, f"{text}  {clock}", no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]


_DISPLAY: ContextVar[Display | None] = ContextVar("display", default=None)


@contextlib.contextmanager
def task(
    text: str, total: int | None = None, *, seconds: float = 0.0,
    enabled: bool = True, theme: Theme | None = None, has_numbers: bool = False,
) -> Iterator[Task]:  # fmt: skip
    """Show what is being done, and about how long it takes, while it is done; also a decorator.

    What a call does in others is shown where the outermost one shows what it does, if it does.
    """
    text += f", {in_words(seconds)}" if seconds >= _NAMED else ""
    begun, display = Task(TaskID(0), text, total, 0, time.monotonic), _DISPLAY.get()
    begun.start_time = time.monotonic()
    with contextlib.ExitStack() as stack:
        is_first = display is None
        display = display or Display(theme, has_numbers=has_numbers)
        display.tasks.append(begun)
        stack.callback(display.tasks.pop)
        if is_first:
            stack.callback(_DISPLAY.reset, _DISPLAY.set(display))
            stack.enter_context(display if enabled else contextlib.nullcontext())
        if seconds >= _LOGGED and display.is_started and not display.auto_refresh:
            logger.info(f"{text}.")
        yield begun


def show_numbers(numbers: Callable[[], dict[str, str]]) -> None:
    """Show numbers, where it is a fit that is shown."""
    if (display := _DISPLAY.get()) is not None and display.has_numbers:
        display.numbers = numbers
