"""Tables of a summary as lines of text and as HTML, with as many digits as the draws can tell."""

import itertools
import math

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

#: Elements shown of a variable, the last one included, as the table gets longer.
_KEPT = (20, 10, 6, 4, 2)
#: Standard deviations outside of these are shown in powers of ten.
_LEAST, _MOST = 1e-4, 1e6
#: Stands for rows that are left out.
_GAP = "..."
Rows = list[tuple[str, list[str]]]


def rows_of(table: pd.DataFrame, *, by_sd: bool, limit: int) -> Rows:
    """Return labels and cells of a table, of long variables only the first elements and the last.

    Parameters
    ----------
    table : pandas.DataFrame
    by_sd : bool
        Whether to show numbers to the second digit of the standard deviation in column ``sd``, instead of as the table
        prints them.
    limit : int
        Rows to show, about.
    """
    places = kept_rows(_variables(table), limit)
    some = table.iloc[[i for i in places if i is not None]]
    cells = iter(_by_sd(some) if by_sd and "sd" in some else _as_printed(some))
    labels = iter(some.index)
    blank = [_GAP] * len(table.columns)
    return [(_GAP, blank) if i is None else (str(next(labels)), next(cells)) for i in places]


def kept_rows(variables: Sequence[str], limit: int) -> list[int | None]:
    """Return the places of the rows to show; None stands for those that are left out.

    Parameters
    ----------
    variables : sequence of str
        The variable that each row is of.
    limit : int

    Examples
    --------
    >>> kept_rows(["a", *5 * ["b"]], 6)
    [0, 1, 2, 3, 4, 5]
    >>> kept_rows(["a", *5 * ["b"]], 5)
    [0, 1, 2, 3, None, 5]
    """
    n = len(variables)
    if n <= limit:
        return list(range(n))
    edges = [0, *(i for i in range(1, n) if variables[i] != variables[i - 1]), n]
    spans = list(itertools.pairwise(edges))
    keep = next((k for k in _KEPT if sum(min(b - a, k) for a, b in spans) <= limit), _KEPT[-1])
    result: list[int | None] = []
    for a, b in spans:
        result += range(a, b) if b - a <= keep else [*range(a, a + keep - 1), None, b - 1]
    if sum(i is not None for i in result) > limit:  # of many variables
        half = limit // 2
        result = [*result[:half], None, *result[len(result) - half :]]
    return result


def _variables(table: pd.DataFrame) -> list[str]:
    """Return the variable that each row is of."""
    return [str(label).split("[")[0] for label in table.index]


def _by_sd(table: pd.DataFrame) -> list[list[str]]:
    """Return cells with digits to the second of the standard deviation, as many for all of a vector where that fits."""
    values, sd, variables = table.to_numpy(dtype=np.float64), table["sd"].to_numpy(), np.array(_variables(table))
    digits = [_digits(s) for s in sd]
    for name in dict.fromkeys(variables):
        of = [digits[i] for i in np.flatnonzero(variables == name)]
        if min(of) >= 0 and max(of) - min(of) == 1:
            digits = [max(of) if v == name else d for v, d in zip(variables, digits, strict=True)]
    return [[_number(x, d) for x in row] for row, d in zip(values, digits, strict=True)]


def _digits(sd: float) -> int:
    """Return how many digits after the point to show for a standard deviation; -1 for four significant ones."""
    return max(0, 1 - math.floor(math.log10(sd))) if _LEAST <= sd < _MOST else -1


def _number(x: float, digits: int) -> str:
    text = f"{x:.4g}" if digits < 0 or not math.isfinite(x) else f"{x:,.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text  # no -0.00


def _as_printed(table: pd.DataFrame) -> list[list[str]]:
    """Return cells as the table shows them: ArviZ rounds each in its own way."""
    columns = [table[[c]].to_string(index=False, header=False).split("\n") for c in table.columns]
    return [[cell.strip() for cell in row] for row in zip(*columns, strict=True)]


def as_text(columns: Sequence[str], sections: Mapping[str, Rows]) -> str:
    """Return one table with a heading above each section, the columns of all of them aligned."""
    indent = 2 * (len(sections) > 1 or "" not in sections)
    rows = [row for part in sections.values() for row in part]
    label_width = max([len(label) for label, _ in rows], default=0) + indent
    widths = [max([len(c), *(len(cells[j]) for _, cells in rows)]) for j, c in enumerate(columns)]
    lines = [_line("", columns, label_width, widths)]
    for heading, part in sections.items():
        lines += [heading] * bool(heading)
        lines += [_line(" " * indent + label, cells, label_width, widths) for label, cells in part]
    return "\n".join(lines)


def _line(label: str, cells: Sequence[str], label_width: int, widths: Sequence[int]) -> str:
    return "  ".join([label.ljust(label_width), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]).rstrip()


def as_html(columns: Sequence[str], sections: Mapping[str, Rows]) -> str:
    """Return the same as an HTML table that takes its colours from the page."""
    number = "text-align:right;padding:.1em .8em;white-space:nowrap;font-variant-numeric:tabular-nums"
    label_style = "text-align:left;padding:.1em .8em .1em 0;font-weight:normal"
    head = "".join(f'<th scope="col" style="{number}">{escape(c)}</th>' for c in columns)
    body = []
    for heading, part in sections.items():
        if heading:
            style = "text-align:left;padding:.6em 0 .1em;border-bottom:1px solid currentColor"
            body.append(
                f'<tr><th colspan="{len(columns) + 1}" scope="colgroup" style="{style}">{escape(heading)}</th></tr>'
            )
        for label, cells in part:
            numbers = "".join(f'<td style="{number}">{escape(c)}</td>' for c in cells)
            body.append(f'<tr><th scope="row" style="{label_style}">{escape(label)}</th>{numbers}</tr>')
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;background:none;color:inherit">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
