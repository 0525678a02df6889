"""What a call shows while it works: the numbers of a fit in a table, and on the line below it what is being done."""

import contextlib
import functools
import io
import logging
import multiprocessing
import sys
import time

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, cast

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
        #: Makes what writes text for a notebook.
        self._text = functools.partial(Console, theme=theme, record=True, force_jupyter=False, force_terminal=False)
        self._in_notebook = console.is_jupyter
        super().__init__(
            console=self._text(file=io.StringIO()) if self._in_notebook else console,
            auto_refresh=self._in_notebook or console.is_interactive,
            transient=self._in_notebook,
        )

    def refresh(self) -> None:
        """Show it as it is now: in a notebook by an output that changes, as it may lack the widgets that Rich takes."""
        if not self._in_notebook:
            super().refresh()
            return
        from IPython.display import display

        with self._lock:
            console = self._text(file=io.StringIO())
            console.print(self.get_renderable(), end="")
            text = console.export_text(clear=False)
            html = console.export_html(inline_styles=True, code_format="<pre style='white-space:pre'>{code}</pre>")
            content = {"text/plain": text, "text/html": html}
            if self._output is not None:
                self._output.update(content, raw=True)
            elif text:
                self._output = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def get_renderable(self) -> Group:
        """Return the table, which stays at the end, and the line."""
        now, tasks, parts = time.monotonic(), list(self.tasks), list[Table | Text]()
        clock, is_seen = str(timedelta(seconds=int(now - self._began))), now - self._began > _UNSEEN
        if self.numbers is not None and (is_seen or not self.is_started):
            texts = self.numbers() | {"Elapsed": clock}
            columns = [Column(header, justify="right", no_wrap=True) for header in texts]
            table, clock = Table(*columns, box=SIMPLE_HEAD, show_edge=False), ""
            table.add_row(*texts.values())
            parts += [table, Text()]
        if self.is_started and is_seen and tasks:
            parts[1:] = [self._line(tasks, clock)]
        return Group(*parts)

    def _line(self, tasks: list[Task], clock: str) -> Text:
        """Return what is being done, or what is counted, with a bar where it is known of how many."""
        of, bar = next((task for task in tasks if task.total or task.completed), tasks[-1]), Text()
        count = f": {of.completed:,}{f' of {of.total:,}' if of.total else ''}" if of.total or of.completed else ""
        if of.total:
            part, seconds = of.completed / of.total, of.elapsed or 0.0
            n_full = int(_BAR * part)
            bar = Text.assemble(("━" * n_full, "bar.complete"), ("━" * (_BAR - n_full), "bar.back"), " ")
            clock += f", {timedelta(seconds=int(seconds / part - seconds))} left" if part else ""
        spinner, text = cast(Text, self._spinner.render(time.monotonic())), f"{of.description}{count}  {clock}"
        return Text.assemble(" ", spinner, " ", bar, text, no_wrap=True, overflow="ellipsis")


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
    begun = Task(TaskID(0), text, total, 0, time.monotonic)
    begun.start_time = time.monotonic()
    with contextlib.ExitStack() as stack:
        if (display := _DISPLAY.get()) is None:
            display = Display(theme, has_numbers=has_numbers)
            stack.callback(_DISPLAY.reset, _DISPLAY.set(display))
            if enabled and multiprocessing.parent_process() is None:  # workers of a notebook write to its server
                of_log = (*logging.root.handlers, *logging.getLogger("pymc").handlers)
                handlers: Any = [handler for handler in of_log if getattr(handler, "stream", None) is sys.stderr]
                stack.enter_context(display)
                for handler in handlers:  # which Rich leaves below its lines, unless they take its stream
                    stack.callback(handler.setStream, handler.stream)
                    handler.setStream(sys.stderr)
        display.tasks.append(begun)
        stack.callback(display.tasks.pop)
        if seconds >= _LOGGED and display.is_started and not display.auto_refresh:
            logger.info(f"{text}.")
        yield begun


def show_numbers(numbers: Callable[[], dict[str, str]]) -> None:
    """Show numbers, where it is a fit that is shown."""
    if (display := _DISPLAY.get()) is not None and display.has_numbers:
        display.numbers = numbers
