"""An approximation as a card of HTML, as notebooks show it."""

from html import escape

from pymc_ngvi.core.elbo import format_gap
from pymc_ngvi.fitting.record import FitRecord

#: Colours are those of the page, light or dark; lines are its text colour, faint.
_FAINT = "color-mix(in srgb, currentColor 25%, transparent)"


def html_card(title: str, record: FitRecord | None, verdict: str | None, body: str) -> str:
    """Return a card: how the fit ended, the verdict, numbers of the fit, the table of parameters."""
    if record is None:
        outcome, numbers = "Not fitted", {}
    else:
        outcome = record.outcome
        numbers = {
            "ELBO": str(record.elbo).replace("+-", "±"),
            "gap": format_gap(record.gap, " nats"),
            "iterations": f"{record.n_iterations:,}",
            "time": f"{record.compile_seconds:.1f} s compiling + {record.run_seconds:.1f} s running",
        }
    parts = [f'<div style="font-size:1.1em"><b>{escape(outcome)}</b> · {escape(title)}</div>']
    if record is not None:
        parts += [_line(said) for said in (record.remark, record.posterior, record.of_discrete) if said]
    if numbers:
        cells = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in numbers.items())
        parts.append(f'<div style="display:flex;flex-wrap:wrap;gap:.2em 1.5em;margin:.4em 0">{cells}</div>')
    if verdict is None:
        parts.append(_line("Not judged yet: approx.summary() or approx.diagnose() say how good the approximation is."))
    else:
        parts.append(_line(f"Verdict: {verdict}"))
    style = f"border:1px solid {_FAINT};border-radius:6px;padding:.7em 1em;max-width:60em;color:inherit;background:none"
    return f'<div style="{style}">{"".join(parts)}{body}</div>'


def _line(text: str) -> str:
    return f'<div style="margin:.4em 0">{escape(text)}</div>'
