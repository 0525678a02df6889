"""The tables of ``posteriors.py``."""

from collections.abc import Sequence

import numpy as np

from functionals import HEAVY
from pages import measured_on, table
from records import Row

__all__ = ["HEAVY", "write"]

CAPTION = """\
Default fits. Seconds: the first fit in a process, with an empty compile folder, and the median of further ones, wall
clock and, in brackets, of processors; without imports, building the model and draws, whose processor seconds are
beside. Times: warm, over what else fits the model in the same run, by processor seconds. k-hat is that of the weights,
and sizes are effective ones. All else is the worst of the fits.
"""
ERRORS_CAPTION = f"""\
Errors beside NUTS, or beside moments that are known otherwise: em, root mean square of errors of means in standard
deviations; es, of relative errors of standard deviations; and the largest of each. Noise: the standard error of such a
difference of means, by the effective sizes of both: the median, and the largest. "Numbers": coordinates that are no
elements of a vector, as scales are. Of functionals with a kurtosis above {HEAVY:g}, moments are not compared. The worst
of the fits in each column.
"""


def write(rows: Sequence[Row], order: Sequence[str]) -> str:
    """Return the tables as Markdown, of the last run of each model."""
    last: dict[str, list[Row]] = {}
    for row in rows:
        kept = last.setdefault(row["model"], [])
        if kept and kept[0]["run"] != row["run"]:
            kept.clear()
        kept.append(row)
    names = [name for name in order if name in last]
    if not names:
        return "No results.\n"
    lines = measured_on([row for name in names for row in last[name]])
    lines += [CAPTION, *_seconds([(name, last[name]) for name in names]), ""]
    judged = [(name, last[name]) for name in names if any(row["coordinate_em"] for row in last[name])]
    return "\n".join([*lines, ERRORS_CAPTION, *_errors(judged), ""]) if judged else "\n".join(lines)


def _seconds(models: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    header = ["model", "d", "first", "warm", "4,000 draws", "beside", "its seconds", "times", "kind", "verdict"]
    header += ["k-hat", "size: hyperparameters", "pairs", "draws", "note"]
    body = []
    for name, rows in models:
        first, warm = ([row for row in rows if row["fit"] == fit] for fit in ("first", "warm"))
        cpu, theirs = _values(warm, "cpu"), _values(rows, "rival_cpu")
        times = f"{np.median(cpu) / np.median(theirs):.2g}" if cpu.size and theirs.size else "-"
        kinds = " / ".join(sorted({row["kind"] for row in rows if row["kind"]}))
        body.append([
            name, rows[0]["n_dim"], _timed(first), _timed(warm), _form(_values(warm, "draws_cpu"), np.median),
            rows[0]["rival"] or "-", _form(theirs, np.median), times, kinds,
            " / ".join(sorted({row["verdict"] for row in rows if row["verdict"]})) or "-",
            _form(_values(rows, "khat"), np.max),
            *(_form(_values(rows, name), np.min, ",.0f") for name in ("theta_size", "pair_size", "size")),
            " / ".join(sorted({row["note"] for row in rows if row["note"]})),
        ])  # fmt: skip
    return table(header, body)


def _errors(models: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    groups = {"coordinate": "coordinates", "functional": "functionals", "scalar": "numbers"}
    header = ["model", *(f"{shown}: {of}" for shown in groups.values() for of in ("em", "es", "worst", "worst sd"))]
    header += ["noise", "size of the reference"]
    body = []
    for name, rows in models:
        cells: list[object] = [name]
        for group in groups:
            cells += [_form(_values(rows, f"{group}_{of}"), np.max, ".2f") for of in ("em", "es")]
            cells += [_largest(rows, f"{group}_worst"), _largest(rows, f"{group}_worst_sd")]
        cells += [
            " to ".join(_form(_values(rows, n), np.max, ".3f") for n in ("noise", "noise_most")),
            _form(_values(rows, "reference_size"), np.min, ",.0f"),
        ]
        body.append(cells)
    return table(header, body)


def _timed(rows: Sequence[Row]) -> str:
    seconds, cpu = _values(rows, "seconds"), _values(rows, "cpu")
    return f"{np.median(seconds):.2g} ({np.median(cpu):.2g})" if seconds.size else "-"


def _largest(rows: Sequence[Row], name: str) -> str:
    known = [row for row in rows if row[name]]
    if not known:
        return "-"
    worst = max(known, key=lambda row: abs(float(row[name])))
    return f"{float(worst[name]):+.2f} `{worst[f'{name}_at']}`"


def _values(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows if row[name]])


def _form(values: np.ndarray, of: object, form: str = ".2g") -> str:
    return format(of(values), form) if values.size else "-"
