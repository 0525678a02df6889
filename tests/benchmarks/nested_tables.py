"""The tables of ``nested.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from pages import measured_on, significant, table
from records import Row

#: Columns that are printed as they are measured.
SHOWN = (
    "status", "posterior", "cold_cpu", "n_fits", "claimed", "verdict", "em_hyper", "es_hyper", "em_latent", "es_latent",
    "elbo_at", "elbo_sd", "corrected_at", "corrected_sd", "laplace_at", "laplace_sd", "error",
)  # fmt: skip
_FITS = """\
All fits are calls of `pm.fit(method="ngvi")` without options. Seconds: of the processor, in a new process with an empty
compile folder, without imports and building the model. "Claimed": the error of log m(g) that the posterior states, an
sd over g in nats. em is the root mean square, over hyperparameters or latent variables (unconstrained), of the error of
the mean in posterior standard deviations; es is that of the relative error of the standard deviation. "ESS": the least
effective sample size of NUTS among the hyperparameters; the mean of one with 1,000 is known to .03 standard deviations.
"""
_LOG_M = """\
Error of log m(g) in nats, against importance sampling with 65,536 draws (16,384 on InstEval). "At the mode" is the
posterior mode of g; "sd" is over 16 draws of g from its posterior: an error that is the same at all g does not matter.
The last column is the largest standard error of an accurate value.
"""


def write_tables(rows: Sequence[Row]) -> str:
    """Return all tables."""
    if not rows:
        return "No results.\n"
    lines = measured_on(rows)
    for part, title, caption, write in (("fit", "Posteriors", _FITS, _fits), ("log m", "log m(g)", _LOG_M, _log_m)):
        own = [row for row in rows if row["part"] == part]
        if own:
            lines += [f"### {title}", "", caption, *write(own), ""]
    return "\n".join(lines) + "\n"


def _fits(rows: Sequence[Row]) -> list[str]:
    header = ["model", "latent", "hyper", "posterior", "seconds", "fits", "claimed", "verdict", "em, hyper"]
    header += ["es, hyper", "em, latent", "es, latent", "ESS"]
    body = []
    for row in rows:
        errors = [_form(_number(row, f"{e}_{kind}"), ".3f") for kind in ("hyper", "latent") for e in ("em", "es")]
        size = _number(row, "ess")
        known = "exact" if np.isinf(size) else _form(size, ",.0f")
        counts = [row["n_latent"] or "-", row["n_hyper"] or "-", row["posterior"] or row["status"]]
        seconds = significant([x]) if np.isfinite(x := _number(row, "cold_cpu")) else "-"
        claimed = _form(_number(row, "claimed"), ".2f")
        own = [seconds, row["n_fits"] or "-", claimed, row["verdict"] or "-"]
        body.append([row["model"], *counts, *own, *errors, known])
    return table(header, body)


def _log_m(rows: Sequence[Row]) -> list[str]:
    names = {"elbo": "ELBO", "corrected": "corrected", "laplace": "Laplace"}
    header = ["model", *(f"{name}, {what}" for name in names.values() for what in ("at the mode", "sd")), "±"]
    body = []
    for row in rows:
        keys = [(f"{name}_at", f"{name}_sd") for name in names]
        cells = [
            _form(_number(row, key), form) for pair in keys for key, form in zip(pair, ("+.3f", ".3f"), strict=True)
        ]
        body.append([row["model"], *cells, _form(_number(row, "error"), ".4f")])
    return table(header, body)


def _number(row: Row, name: str) -> float:
    return float(row[name]) if row.get(name) else np.nan


def _form(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"
