"""The progress of many fits: how many are done, how many failed, and the time that is left."""

from collections.abc import Iterable, Iterator

from pymc.progress_bar import default_progress_theme
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from pymc_ngvi.fitting.progress import console_for
from pymc_ngvi.many.fitting import Row


def shown(rows: Iterable[Row], total: int | None, enabled: bool) -> Iterator[Row]:
    """Hand rows on, and show how many there were.

    Parameters
    ----------
    rows : iterable of Row
    total : int or None
        None where it is not known: then neither is what is left.
    enabled : bool
    """
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), TimeElapsedColumn(), TextColumn("left:"), Remaining()] if total else [TimeElapsedColumn()]
    console, in_text = console_for(default_progress_theme)
    with Progress(*columns, console=console, disable=not enabled or in_text) as progress:
        task, failed = progress.add_task(_words(0, total, 0), total=total), 0
        for done, row in enumerate(rows, 1):
            failed += bool(row.error)
            progress.update(task, completed=done, description=_words(done, total, failed))
            yield row


def _words(done: int, total: int | None, failed: int) -> str:
    of = "" if total is None else f" of {total:,}"
    return f"{done:,}{of} fits" + (f", {failed:,} failed" if failed else "")
