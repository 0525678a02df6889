"""The tables of ``rows.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from pages import measured_on, significant, table
from records import Row

CAPTION = """\
All fits are calls of `pm.fit(method="ngvi")`. "Gaussian" is `posterior="gaussian"`, "posterior" is `posterior="exact"`;
"draws" adds `estimator="price"`. Cold: the first fit of a new process with an empty compile folder, without imports and
building the model. Warm: the second fit of the same model in that process. Seconds are processor seconds, as other work
ran on the machine; ratios are of the same run. "Evaluations": expectations of log p, or Hessians where there are draws.
em is the root mean square over unconstrained coordinates of the error of the mean in standard deviations of NUTS, es
that of the relative error of the standard deviation.
"""
_LOGISTIC = """\
Standard normal columns, coefficients N(0, .3), prior N(0, 1). "NumPy" is a loop written for this model alone: natural
steps, exact expectations, a line search (`tests/benchmarks/rows_numpy.py`). Memory is the largest resident memory of
the process over the size of X, in brackets what it was before the fit.
"""
_REFERENCES = "Logistic regressions with the prior N(0, 10²), against NUTS (whose own error is about .02).\n"
_WIDE = "Logistic regressions with the prior N(0, 1).\n"
_GROUPS = """\
Intercepts: logistic, simulated groups of 10. HERS and toenail: logistic with an intercept for each group. Epilepsy:
Poisson, an intercept and a slope. glmmTMB has no priors; its seconds are those of the call, with standard errors.
"Rival / ours": processor seconds of the fit with draws, and of glmmTMB, over ours.
"""
_RASCH = "Ability N(0, 1) of each person, difficulty N(0, sd) of each item.\n"
_KINKS = "em and es are those against NUTS (nutpie, 20,000 draws).\n"


def write_tables(rows: Sequence[Row]) -> str:
    """Return all tables."""
    if not rows:
        return "No results.\n"
    parts = {
        "logistic": ("Many rows", _LOGISTIC, _logistic),
        "references": ("Against NUTS", _REFERENCES, _references),
        "wide": ("Many columns", _WIDE, _wide),
        "groups": ("Groups", _GROUPS, _groups),
        "rasch": ("Rasch model", _RASCH, _wide),
        "kinks": ("Kinks", _KINKS, _kinks),
    }
    lines = [*measured_on(rows), CAPTION]
    for part, (title, caption, write) in parts.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            lines += [f"### {title}", "", caption, *write(own), ""]
    return "\n".join(lines) + "\n"


def _logistic(rows: Sequence[Row]) -> list[str]:
    header = ["rows", "fit", "cold", "warm", "warm / NumPy", "ELBO", "evaluations", "memory / data", "ended"]
    body: list[list[object]] = []
    for model, of_model in _by_model(rows):
        loop = _number(of_model.get("numpy"), "warm_cpu")
        for method, row in of_model.items():
            memory, before = (_number(row, name) / _number(row, "data_mib") for name in ("memory", "memory_before"))
            ratio = _form(_number(row, "warm_cpu") / loop, ".2f")
            name = "NumPy" if method == "numpy" else method
            start = [f"{int(model):,}", name, *_seconds(row), ratio, _elbo(row), row["evaluations"]]
            body.append([*start, f"{_form(memory, '.1f')} [{_form(before, '.1f')}]", row["status"]])
    growth = _growth(rows)
    return table(header, body) + ([f"\n{growth}"] if growth else [])


def _growth(rows: Sequence[Row]) -> str:
    ours = {int(row["model"]): _number(row, "warm_cpu") for row in rows if row["method"] == "gaussian"}
    if len(ours) < 2 or not np.isfinite(list(ours.values())).all():
        return ""
    least, most = min(ours), max(ours)
    return f"{most:,} rows take {ours[most] / ours[least]:.1f} times as long as {least:,}."


def _references(rows: Sequence[Row]) -> list[str]:
    header = ["model", "d", "seeds", "ELBO, least", "ELBO, most", "evaluations", "em", "es", "cold", "warm", "ended"]
    body = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        of = {name: [_number(row, name) for row in own] for name in ("elbo", "evaluations", "em", "es", "cold_cpu")}
        evaluations = f"{min(of['evaluations']):.0f} to {max(of['evaluations']):.0f}"
        worst = [f"{max(of[name]):.3f}" for name in ("em", "es")]
        seconds = [significant(of["cold_cpu"]), significant([_number(row, "warm_cpu") for row in own])]
        elbos = [f"{least(of['elbo']):,.4f}" for least in (min, max)]
        ends = ", ".join(dict.fromkeys(row["status"] for row in own))
        body.append([model, own[0]["n_dim"], len(own), *elbos, evaluations, *worst, *seconds, ends])
    return table(header, body)


def _wide(rows: Sequence[Row]) -> list[str]:
    header = ["model", "d", "fit", "cold", "warm", "ELBO", "iterations", "evaluations", "ended"]
    body = []
    for model, of_model in _by_model(rows):
        for method, row in of_model.items():
            name = "NumPy" if method == "numpy" else method
            counts = [row["n_iterations"] or "-", row["evaluations"] or "-"]
            body.append([model, row["n_dim"], name, *_seconds(row), _elbo(row), *counts, row["status"]])
    return table(header, body)


def _groups(rows: Sequence[Row]) -> list[str]:
    header = ["model", "fit", "cold", "warm", "rival / ours: cold", "warm", "glmmTMB / ours: warm", "ELBO", "em", "es"]
    header += ["exact", "ended"]
    body = []
    for model, of_model in _by_model(rows):
        theirs = _number(of_model.get("glmmTMB"), "cold_cpu")
        for method, row in of_model.items():
            rival = of_model.get(f"{method}, draws", {})
            ratios = [_form(_number(rival, n) / _number(row, n), ".1f") for n in ("cold_cpu", "warm_cpu")]
            beside = _form(theirs / _number(row, "warm_cpu"), ".2f") if method != "glmmTMB" else "-"
            errors = [_form(_number(row, name), ".3f") for name in ("em", "es")]
            exact = {"True": "yes", "False": "no"}.get(row["is_exact"], "-")
            body.append([model, method, *_seconds(row), *ratios, beside, _elbo(row), *errors, exact, row["status"]])
    return table(header, body)


def _kinks(rows: Sequence[Row]) -> list[str]:
    header = ["model", "fit", "cold", "warm", "ELBO", "iterations", "em", "es", "ended"]
    body = []
    for model, of_model in _by_model(rows):
        for method, row in of_model.items():
            errors = [_form(_number(row, name), ".3f") for name in ("em", "es")]
            body.append([model, method, *_seconds(row), _elbo(row), row["n_iterations"] or "-", *errors, row["status"]])
    return table(header, body)


def _by_model(rows: Sequence[Row]) -> list[tuple[str, dict[str, Row]]]:
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, {row["method"]: row for row in rows if row["model"] == model}) for model in models]


def _seconds(row: Row) -> list[str]:
    return [significant([x]) if np.isfinite(x := _number(row, name)) else "-" for name in ("cold_cpu", "warm_cpu")]


def _elbo(row: Row) -> str:
    value, error = _number(row, "elbo"), _number(row, "elbo_se")
    if not np.isfinite(value):
        return "-"
    return f"{value:,.3f}" if not error > 5e-4 else f"{value:,.3f} ± {error:.3f}"


def _number(row: Row | None, name: str) -> float:
    return float(row[name]) if row and row.get(name) else np.nan


def _form(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"
