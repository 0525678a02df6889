"""The tables of ``natgrad.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from pages import measured_on, significant, table
from records import Row

_DISTANCES = (10.0, 1.0, 0.1)


def write_tables(rows: Sequence[Row]) -> str:
    """Return a table for each problem."""
    if not rows:
        return "No results.\n"
    versions = sorted({row["versions"] for row in rows if row["versions"]})
    lines = [*measured_on(rows)[:-1], *(f"- {version}" for version in versions), ""]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        own = [row for row in rows if row["problem"] == problem]
        best = min(float(row["loss"]) for row in own if row["loss"])
        lines += [f"### {problem}: -ELBO {best:.3f}", "", *_table(own, best), ""]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], best: float) -> list[str]:
    header = ["method", "nodes", "step size", *(f"{distance:g} nat{'s'[: distance != 1]}" for distance in _DISTANCES)]
    header += ["seconds, cold", "warm", "evaluations in all", "end", "end by its own quadrature"]
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[name] for name in ("method", "variant", "nodes", "step_size")), []).append(row)
    return table(header, [_line(key, run, best) for key, run in runs.items()])


def _line(key: tuple[str, ...], run: Sequence[Row], best: float) -> list[object]:
    above = np.array([float(row["loss"]) - best if row["loss"] else np.nan for row in run])
    number = [int(row["evaluation"]) for row in run]
    arrived = [np.flatnonzero(above < distance) for distance in _DISTANCES]
    counts = [str(number[found[0]]) if len(found) else "-" for found in arrived]
    seconds = [_seconds(run[arrived[-1][0]][which]) if len(arrived[-1]) else "-" for which in ("cold", "warm")]
    own = run[-1]["own"]
    end = [_nats(above[-1]), _nats(float(own) - best) if own else "not finite"] if number[-1] else ["fails", "-"]
    method, variant, nodes, size = key
    name = method if variant == "default" else f"{method}, {variant}"
    setting = ["exact", "-"] if variant == "default" else [nodes, size]
    return [name, *setting, *counts, *seconds, number[-1], *end]


def _seconds(value: str) -> str:
    return significant([float(value)]) if value else "-"


def _nats(value: float) -> str:
    if not np.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) >= 1e-3 else "0"
