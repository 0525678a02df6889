"""Result rows in a CSV file that grows by one row per finished measurement."""

import csv

from collections.abc import Callable, Iterable
from pathlib import Path

Row = dict[str, str]

#: Rows and tables of a benchmark, and the figures of experiments, which pages of the site show.
RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[2] / "docs" / "experiments"


class Records:
    """Rows of one CSV file, with a fixed set of columns.

    Parameters
    ----------
    path : Path
        The file; it is created with the first row.
    fields : iterable of str
        The columns, in order. An existing file must have the same ones.

    Raises
    ------
    SystemExit
        If the file exists with other columns.
    """

    def __init__(self, path: Path, fields: Iterable[str]) -> None:
        self.path = path
        self.fields = list(fields)
        if path.exists():
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header != self.fields:
                raise SystemExit(f"{path} has other columns than this script writes: name another file.")

    def read(self) -> list[Row]:
        """Return all rows, every value as text."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def append(self, values: dict[str, object]) -> None:
        """Append one row; columns without a value stay empty."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.fields)
            if new:
                writer.writeheader()
            writer.writerow({name: _text(values.get(name)) for name in self.fields})

    def drop(self, unwanted: Callable[[Row], bool]) -> int:
        """Remove the rows for which ``unwanted`` is true and return how many there were."""
        rows = self.read()
        kept = [row for row in rows if not unwanted(row)]
        if len(kept) < len(rows):
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.fields)
                writer.writeheader()
                writer.writerows(kept)
        return len(rows) - len(kept)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.8g}" if isinstance(value, float) else str(value)
