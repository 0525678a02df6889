"""A picture of a fit: ELBO and gap by iteration."""

import warnings

from typing import Any, Literal, NamedTuple

import numpy as np

from pymc_ngvi.core.elbo import format_elbo, format_gap
from pymc_ngvi.core.types import Array
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.plotting.style import (
    FAINT,
    FONT_SIZE,
    LINE,
    OTHER,
    Axes,
    AxesArray,
    Figure,
    need_matplotlib,
    trim,
    write_title,
)

#: Of more iterations, so many groups are drawn, each as its median between its least and largest value.
_MAX_POINTS = 500
#: Iterations that are marked one by one.
_MAX_MARKED = 100
#: How far below the last half of the iterations the axis of the ELBO reaches, in parts of its range.
_BELOW, _ABOVE = 4.0, 0.5
#: Least range of the ELBO that fills the axis, nats.
_LEAST_RANGE = 0.1
#: Gaps below this, nats, are not told apart; decades that are shown at most.
_NO_GAP, _DECADES = 1e-4, 8


class _Curve(NamedTuple):
    """Values by iteration, few enough to draw: (n_points,) each."""

    iteration: Array
    middle: Array
    low: Array
    high: Array


def plot_fit(
    losses: Array, gaps: Array, record: FitRecord, *, tol: float | None = None, figure: Figure | None = None
) -> AxesArray:
    """Plot the ELBO, and the nats still to be gained, after each iteration of a fit.

    The axis of the ELBO reaches over what the last half of the iterations did: the first ones, which are often
    thousands of nats lower, are counted in a note. Of more than 500 iterations, groups of successive ones are shown
    by their median and their range.

    Parameters
    ----------
    losses : ndarray, shape (n_iterations,)
        -ELBO in nats, on the draws then in use or by quadrature; empty where it was not kept.
    gaps : ndarray, shape (n_iterations,)
        Estimated nats still to be gained; NaN where not known.
    record : FitRecord
        How the fit ended.
    tol : float, optional
        Nats that may be left to gain: drawn as a line.
    figure : matplotlib.figure.Figure or SubFigure, optional
        To draw into; by default one is made.

    Returns
    -------
    ndarray of matplotlib.axes.Axes
        That of the ELBO, and that of the gap; one of them where the other is not known.

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.
    ValueError
        Where there is no iteration to show, or ``tol`` is not positive.
    """
    if tol is not None and not tol > 0.0:
        raise ValueError(f"tol is in nats and should be positive; got {tol!r}.")
    losses, gaps = np.asarray(losses, dtype=np.float64), np.asarray(gaps, dtype=np.float64)
    panels = [_draw_elbo] if np.isfinite(losses).any() else []
    panels += [_draw_gap] if np.isfinite(gaps).any() else []
    if not panels:
        raise ValueError("There is nothing to show: no iteration was run, or score=False left its ELBO out.")
    pyplot = need_matplotlib("plot_fit")
    if figure is None:
        figure = pyplot.figure(figsize=(6.5, 1.0 + 2.0 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, draw in zip(axes, panels, strict=True):
        draw(ax, losses, gaps, record, tol)
        trim(ax)
    _label_iterations(axes[-1], max(len(losses), len(gaps)))
    write_title(axes[0], _outcome(record))
    return axes


def _outcome(record: FitRecord) -> str:
    """Return how the fit ended; where it did not converge, in a whole sentence."""
    n = record.n_iterations
    line = f"{record.outcome} after {n:,} iteration{'s'[: n != 1]}, gap {format_gap(record.gap, ' nats')}"
    return f"{line}. {record.sentence}" if record.remark else line


def _label_iterations(ax: Axes, n: int) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlabel("iteration")
    margin = 0.02 * n
    ax.set_xlim(1.0 - max(margin, 0.3), n + max(margin, 0.3))


def _has_draws(record: FitRecord) -> bool:
    return record.estimator != "quadrature"


def _at_end(record: FitRecord) -> str:
    return "at the end, on fresh draws" if _has_draws(record) else "at the end"


# --- the panels ---


def _draw_elbo(ax: Axes, losses: Array, gaps: Array, record: FitRecord, tol: float | None) -> None:
    from matplotlib.ticker import ScalarFormatter

    elbos = np.where(np.isfinite(losses), -losses, np.nan)
    low, high = _limits(elbos, record.elbo.value)
    _draw(ax, _curve(elbos), "on the draws in use" if _has_draws(record) else "")
    if np.isfinite(record.elbo.value):
        text = f"{_at_end(record)}: {format_elbo(round(record.elbo.value, 2) + 0.0)}"  # no -0.00
        ax.axhline(record.elbo.value, color=OTHER, linewidth=1.0, linestyle="--", label=text)
    ax.set_ylim(low, high)
    ax.set_ylabel("ELBO (nats)")
    ax.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    hidden = elbos < low
    note = f"{np.count_nonzero(hidden):,} of {len(elbos):,} lower, down to {_rounded(np.nanmin(elbos))}"
    _write_legend(ax, "lower right", note if hidden.any() else "")


def _draw_gap(ax: Axes, losses: Array, gaps: Array, record: FitRecord, tol: float | None) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    known = np.concatenate([gaps[np.isfinite(gaps)], [value for value in (tol, record.gap) if value is not None]])
    positive = known[known > _NO_GAP]
    bottom = 0.5 * float(positive.min()) if len(positive) else _NO_GAP
    top = float(np.clip(known[np.isfinite(known)].max(), 10.0 * bottom, 10.0**_DECADES * bottom))
    ax.set_yscale("log")
    _draw(ax, _curve(np.where(np.isfinite(gaps), np.maximum(gaps, bottom), np.nan)), "")
    if np.isfinite(record.gap):
        text = f"{_at_end(record)}: {format_gap(record.gap)}"
        end = float(np.clip(record.gap, bottom, 3.0 * top))
        ax.plot(len(gaps), end, "D", color=OTHER, markersize=4, label=text, clip_on=False, zorder=3)
    if tol is not None:
        ax.axhline(tol, color=FAINT, linewidth=1.0, linestyle=":", label=f"tolerance: {tol:.3g}")
    ax.set_ylim(bottom, 3.0 * top)
    ax.set_ylabel("still to be gained (nats)")
    ax.yaxis.set_major_locator(LogLocator(numticks=6))
    ax.yaxis.set_minor_formatter(NullFormatter())
    _write_legend(ax, "upper right", "")


def _write_legend(ax: Axes, place: Literal["lower right", "upper right"], note: str) -> None:
    if ax.get_legend_handles_labels()[1]:
        ax.legend(
            title=note or None, fontsize=FONT_SIZE, title_fontsize=FONT_SIZE, alignment="left", frameon=False, loc=place
        )


def _draw(ax: Axes, curve: _Curve, label: str) -> None:
    marked: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve.iteration) <= _MAX_MARKED else {}
    if np.any(curve.high > curve.low):
        ax.fill_between(curve.iteration, curve.low, curve.high, color=LINE, alpha=0.25, linewidth=0)
    ax.plot(curve.iteration, curve.middle, color=LINE, linewidth=1.2, label=label, **marked)


# --- what to draw ---


def _curve(values: Array) -> _Curve:
    """Return values by iteration, successive ones together where there are too many."""
    n = len(values)
    size = -(-n // _MAX_POINTS)
    if size <= 1:
        return _Curve(np.arange(1.0, n + 1.0), values, values, values)
    groups = np.concatenate([values, np.full(-n % size, np.nan)]).reshape(-1, size)
    iteration = np.minimum(np.arange(len(groups)) * size + 0.5 * (size + 1), n)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        return _Curve(iteration, np.nanmedian(groups, axis=1), np.nanmin(groups, axis=1), np.nanmax(groups, axis=1))


def _limits(elbos: Array, last: float) -> tuple[float, float]:
    """Return the ends of the axis of the ELBO: those of the last half of the iterations, and some way beyond."""
    finite = elbos[np.isfinite(elbos)]
    late = finite[len(finite) // 2 :]
    # A few outliers of a noisy fit are no part of the range.
    low, high = np.quantile(late, [0.01, 0.99]) if len(late) > _MAX_MARKED else (late.min(), late.max())
    if np.isfinite(last):
        low, high = min(low, last), max(high, last)
    span = max(high - low, _LEAST_RANGE)
    low, high = max(low - _BELOW * span, finite.min()), min(high + _ABOVE * span, max(finite.max(), high))
    margin = max(0.06 * (high - low), 0.05 * _LEAST_RANGE)
    return float(low - margin), float(high + margin)


def _rounded(nats: float) -> str:
    return f"{nats:,.0f}" if abs(nats) < 1e6 else f"{nats:.1e}"
