"""The tables of ``nested.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from pages import measured_on, significant, table
from records import Row

#: Columns that are printed as they are measured.
SHOWN = (
    "status", "posterior", "cold_cpu", "n_fits", "claimed", "verdict", "em_hyper", "es_hyper", "em_latent", "es_latent",
    "elbo_mean", "elbo_sd", "corrected_mean", "corrected_sd", "laplace_mean", "laplace_sd", "error",
)  # fmt: skip
_FITS = """\
All fits are calls of `pm.fit(method="ngvi")` without options, but for InstEval, with `posterior="nested"`. Seconds: of
the processor, in a new process with an empty compile folder, without imports and building the model. "Claimed": the
error of log m(g) that the posterior states, an sd over g in nats; 0 where pairs of g and latent variables have weights.
em is the root mean square, over hyperparameters or latent variables (unconstrained), of the error of the mean in
posterior standard deviations; es is that of the relative error of the standard deviation, both against an integral.
"""
_NUTS = """\
The same errors of NUTS against the integrals. "ESS": the least effective sample size among the hyperparameters, by
which a mean is known to 1 / sqrt(ESS) standard deviations. "Integral": the same of the means of the integral, the
least of all coordinates.
"""
_LOG_M = """\
Error of log m(g) in nats: mean and sd over 20 draws of g from its posterior. An error that is the same at all g does
not matter, so that the sd is what counts. "ELBO": of the conditional fit; "corrected": with what it is estimated to
lack, as nested posteriors use it; "Laplace": by mode and curvature of log p(g, .). The accurate values are means of
65,536 importance weights (131,072 of CAR and gp.Latent, 32,768 of InstEval), from the conditional fit: the last two
columns are their largest standard error, and the largest k-hat of their weights.
"""


def write_tables(rows: Sequence[Row]) -> str:
    """Return all tables."""
    if not rows:
        return "No results.\n"
    lines = measured_on(rows)
    parts = (
        ("fit", "Posteriors", _FITS, _fits),
        ("fit", "The references", _NUTS, _references),
        ("log m", "log m(g)", _LOG_M, _log_m),
    )
    for part, title, caption, write in parts:
        own = [row for row in rows if row["part"] == part]
        if own:
            lines += [f"### {title}", "", caption, *write(own), ""]
    return "\n".join(lines) + "\n"


def _fits(rows: Sequence[Row]) -> list[str]:
    header = ["model", "latent", "hyper", "posterior", "seconds", "fits", "claimed", "verdict", "em, hyper"]
    header += ["es, hyper", "em, latent", "es, latent"]
    body = []
    for row in rows:
        errors = [_form(_number(row, f"{e}_{kind}"), ".3f") for kind in ("hyper", "latent") for e in ("em", "es")]
        counts = [row["n_latent"] or "-", row["n_hyper"] or "-", row["posterior"] or row["status"]]
        seconds = significant([x]) if np.isfinite(x := _number(row, "cold_cpu")) else "-"
        claimed = _form(_number(row, "claimed"), ".2f")
        own = [seconds, row["n_fits"] or "-", claimed, row["verdict"] or "-"]
        body.append([row["model"], *counts, *own, *errors])
    return table(header, body)


def _references(rows: Sequence[Row]) -> list[str]:
    header = ["model", "em, hyper", "es, hyper", "em, latent", "es, latent", "ESS", "Integral"]
    body = []
    for row in (row for row in rows if row["accurate"]):
        errors = [_form(_number(row, f"nuts_{e}_{kind}"), ".3f") for kind in ("hyper", "latent") for e in ("em", "es")]
        size = _number(row, "accurate")
        known = "exact" if np.isinf(size) else _form(size, ",.0f")
        body.append([row["model"], *errors, _form(_number(row, "ess"), ",.0f"), known])
    return table(header, body)


def _log_m(rows: Sequence[Row]) -> list[str]:
    names = {"elbo": "ELBO", "corrected": "corrected", "laplace": "Laplace"}
    header = ["model", *(f"{name}, {what}" for name in names.values() for what in ("mean", "sd")), "±", "k-hat"]
    body = []
    for row in rows:
        keys = [(f"{name}_mean", f"{name}_sd") for name in names]
        cells = [
            _form(_number(row, key), form) for pair in keys for key, form in zip(pair, ("+.3f", ".3f"), strict=True)
        ]
        known = [_form(_number(row, "error"), ".4f"), _form(_number(row, "khat"), ".2f")]
        body.append([row["model"], *cells, *known])
    return table(header, body)


def _number(row: Row, name: str) -> float:
    return float(row[name]) if row.get(name) else np.nan


def _form(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"
