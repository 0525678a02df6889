"""Markdown: rows of tables, and pages that have tables between marks."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from records import Row


def write_between_marks(file: Path, tables: str, script: str) -> None:
    """Write tables into a page, in the place of those between its marks, or into a file of their own.

    A page may have tables of several scripts, each between marks of its own.

    Raises
    ------
    SystemExit
        If the file exists without the marks.
    """
    marks = (f"<!-- tables: written by tests/benchmarks/{script} -->", "<!-- end of the tables -->")
    page = file.read_text() if file.exists() else f"{marks[0]}\n{marks[1]}\n"
    if not all(mark in page for mark in marks):
        raise SystemExit(f"{file} has no marks for tables: name another file.")
    before, rest = page.split(marks[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{before}{marks[0]}\n\n{tables}\n{marks[1]}{rest.split(marks[1], 1)[1]}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    return [_line(header), _line(["---"] * len(header)), *(_line(row) for row in rows)]


def measured_on(rows: Sequence[Row]) -> list[str]:
    """Return the lines that say when, and on what machines, rows were measured."""
    dates = sorted(row["date"][:10] for row in rows)
    lines = [f"Measured {dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'} on:", ""]
    return [*lines, *(f"- {environment}" for environment in sorted({row["environment"] for row in rows})), ""]


def column_of(rows: Sequence[Row]) -> Callable[[str], np.ndarray]:
    """Return the function from the name of a column to its values, rows without one left out."""
    return lambda name: np.array([float(row[name]) for row in rows if row[name]])


def median(values: np.ndarray, form: str) -> str:
    """Return the median as text, with the range where there are several values."""
    if not len(values):
        return "-"
    middle = format(float(np.median(values)), form)
    return middle if len(values) == 1 else f"{middle} [{values.min():{form}}, {values.max():{form}}]"


def significant(values: np.ndarray | Sequence[float]) -> str:
    """Return the median to two significant digits, without an exponent."""
    if not len(values):
        return "-"
    middle = float(np.median(values))
    return f"{middle:,.0f}" if middle >= 10 else f"{middle:.2g}"


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
