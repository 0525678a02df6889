"""Pictures of a fit."""

import textwrap
import warnings

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.elbo import format_elbo, format_gap
from pymc_ngvi.core.linalg import cholesky
from pymc_ngvi.core.psis import khat_limit, pareto_khat, tail_length, weigh
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.families import MixtureState
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.convert import indices_of
from pymc_ngvi.results.diagnosis.weights import weights_and_elbo
from pymc_ngvi.results.posterior import Posterior

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    from arviz_plots.plot_collection import PlotCollection
    from arviz_plots.plot_matrix import PlotMatrix

#: What pictures are drawn into, and what they return.
type Axes = matplotlib.axes.Axes
type Figure = matplotlib.figure.Figure | matplotlib.figure.SubFigure
type AxesArray = NDArray[np.object_]
#: Told apart by colour-blind readers, too.
LINE, OTHER, WARNING = "#1c5c9e", "#d55e00", "#b03a2e"
FAINT = "0.45"
FONT_SIZE, TITLE_SIZE = 8, 9
#: Width of a character, in parts of the size of its font.
_CHARACTER = 0.55


def need_matplotlib(function: str) -> ModuleType:
    """Return ``matplotlib.pyplot``."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"{function} needs Matplotlib: pip install matplotlib") from error
    return pyplot


def write_title(ax: Axes, text: str) -> None:
    """Write a title above axes, in lines that are no wider than these."""
    inches = ax.get_position().width * ax.figure.bbox.width / ax.figure.dpi
    width = inches * 72.0 / (_CHARACTER * TITLE_SIZE)
    lines = textwrap.wrap(text, max(int(width), 20), max_lines=3, placeholder=" …")
    ax.set_title("\n".join(lines), fontsize=TITLE_SIZE, loc="left")


def trim(ax: Axes) -> None:
    """Leave out the frame above and at the right, and make the letters small."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=FONT_SIZE)
    ax.xaxis.label.set_fontsize(FONT_SIZE)
    ax.yaxis.label.set_fontsize(FONT_SIZE)


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


#: Points along a curve; weights that are drawn, of those that are not in the tail.
_N_POINTS = 200
#: Weights below this part of their mean are not shown.
_LEAST = 1e-3


def khat_title(posterior: Posterior) -> str | None:
    """Return the title of `plot_khat` for weights that are kept; None, for its own title, where there are none."""
    if (kept := posterior.distribution.kept_log_weights()) is None:
        return None
    found = weights_and_elbo(kept)[0]
    return (
        f"Weights of the pool of global parameters that this posterior is drawn from: Pareto k-hat "
        f"{found.khat_text()}, {found.n_draws:,} draws with an effective sample size of {found.effective:,.0f}"
    )


def plot_khat(log_p: Array, log_q: Array, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot how many importance weights p/q are larger than a given one, and the Pareto tail that k-hat is fitted to.

    Both axes are logarithmic. The tail is that of Pareto-smoothed importance sampling; beside it are the tails that k
    at the limit of use, and at 1, where the weights have no mean, would have. Points below the first: q can be used.

    Parameters
    ----------
    log_p, log_q : ndarray, shape (n_draws,)
        Log densities at the same draws of q, on the unconstrained scale; constants do not matter.
    title : str, optional
        Default: what the weights say of q.
    ax : matplotlib.axes.Axes, optional
        To draw into; by default a figure is made.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.
    ValueError
        For fewer than 100 draws.

    References
    ----------
    .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
       https://doi.org/10.48550/arXiv.1507.02646

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).standard_t(5, size=2_000)
    >>> ax = plot_khat(log_p=-0.5 * x**2, log_q=-3.0 * np.log1p(x**2 / 5))
    >>> ax.get_xscale(), ax.get_yscale()
    ('log', 'log')
    """
    pyplot = need_matplotlib("plot_khat")
    khat = pareto_khat(log_p, log_q)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6.5, 4.0), layout="constrained")
    n = len(log_p)
    weights = _weights(log_p, log_q)
    shown = np.sort(weights[weights >= _LEAST])[::-1]
    share = np.arange(1, len(shown) + 1) / n
    n_tail = min(tail_length(n), len(shown))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.plot(shown[n_tail - 1 :], share[n_tail - 1 :], color=LINE, linewidth=1.2)
    ax.plot(shown[:n_tail], share[:n_tail], "o", color=LINE, markersize=2.5, label=f"weights; dots: tail of {n_tail:,}")
    if n_tail < len(shown) and np.median(shown[:n_tail]) > shown[n_tail]:
        _draw_tails(ax, shown[: n_tail + 1], n, khat)
    ax.set_ylim(0.5 / n, 3.0)
    _label_weights(ax)
    ax.set_xlabel("weight p/q, relative to the mean")
    ax.set_ylabel("share of the draws with a larger weight")
    note = f"largest weight: {weights.max() / weights.sum():.2g} of their sum"
    ax.annotate(note, (0.02, 0.03), xycoords="axes fraction", fontsize=FONT_SIZE, color=FAINT)
    ax.legend(fontsize=FONT_SIZE, frameon=False, loc="upper right")
    trim(ax)
    write_title(ax, weigh(log_p, log_q)[1].sentence() if title is None else title)
    return ax


def _label_weights(ax: Axes) -> None:
    """Widen the axis of weights that hardly differ, and write round numbers along it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    left, right = ax.get_xlim()
    left, right = min(left, 0.3), max(right, 3.0)
    ax.set_xlim(left, right)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if right > 300.0 * left else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _weights(log_p: Array, log_q: Array) -> Array:
    """Return the weights over their mean, (n_draws,); 0 where log p is not finite."""
    log_ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
    top = log_ratio.max()
    # Where the largest is infinite, it has all of the weight.
    weights = (log_ratio == top).astype(np.float64) if np.isinf(top) else np.exp(log_ratio - top)
    return weights / weights.mean()


def _draw_tails(ax: Axes, tail: Array, n: int, khat: float) -> None:
    """Draw Pareto tails that begin where the tail of the weights, from the largest, does."""
    start, excess = tail[-1], tail[:-1] - tail[-1]
    share = (len(tail) - 1) / n
    median = float(np.median(excess))
    right = start + np.geomspace(1e-2 * median, 4.0 * excess.max(), _N_POINTS)
    limit = khat_limit(n)
    kinds = [(limit, OTHER, "--", f"k = {limit:.2g}: limit of use"), (1.0, WARNING, ":", "k = 1: no mean")]
    if np.isfinite(khat):
        kinds.insert(0, (khat, "0.15", "-", f"k = {khat:.2f}: fitted"))
    for k, colour, style, label in kinds:
        survival = _survival(right - start, k, median)
        ax.plot(right, share * survival, color=colour, linestyle=style, linewidth=1.2, label=label)


def _survival(excess: Array, k: float, median: float) -> Array:
    """Return the part of a generalised Pareto distribution with a given median that is above each excess."""
    if abs(k) < 1e-6:
        return np.asarray(np.exp2(-excess / median))
    # Median: scale (2^k - 1) / k.
    base = 1.0 + np.expm1(k * np.log(2.0)) * excess / median
    return np.asarray(np.where(base > 0.0, np.maximum(base, 1e-300) ** (-1.0 / k), np.nan))


type Plot = PlotCollection | PlotMatrix
Kind = Literal["forest", "dist", "pair"]
#: Coordinates that each kind shows unless more are asked for.
_MOST = {"forest": 40, "dist": 20, "pair": 5}
#: Width of a forest plot and, about, of a character of its names, inches.
_WIDTH, _NAME_CHARACTER = 7.0, 0.09
#: Room above the first and below the last interval of a forest plot; rows are 1 apart.
_MARGIN = 0.5
#: Names of the two, in the legend.
_OURS, _REFERENCE = "ngvi", "reference"


def plot_comparison(
    draws: xr.DataTree | xr.Dataset,
    reference: xr.DataTree | xr.Dataset,
    var_names: str | Sequence[str] | None = None,
    kind: Kind = "forest",
    *,
    max_coordinates: int | None = None,
    **options: Any,
) -> Plot:
    """Plot draws of q beside those of a reference, such as NUTS, with arviz-plots.

    Each coordinate of a variable counts as a variable of its own: ``beta[age]``.

    Parameters
    ----------
    draws, reference : DataTree or Dataset
        With the group ``posterior``, or that group: dims ``chain`` and ``draw``, and those of each variable. Shapes
        have to agree, names of dims not. Of the longer of the two, evenly spaced draws are used.
    var_names : str or sequence of str, optional
        Variables (``beta``) or single coordinates (``beta[age]``). Default: the variables that both have.
    kind : {"forest", "dist", "pair"}, default "forest"
        Of ``arviz_plots``: intervals, marginal densities, or pairs of coordinates.
    max_coordinates : int, optional
        Of more, those are shown in which the two differ most, as the figure then says: by the Kullback-Leibler
        divergence between normal distributions with their means and standard deviations. Default: 40, 20 and 5 for
        the three kinds.
    **options
        Passed to ``arviz_plots.plot_forest``, ``plot_dist`` or ``plot_pair``.

    Returns
    -------
    arviz_plots.PlotCollection or arviz_plots.PlotMatrix

    Raises
    ------
    ImportError
        Where arviz-plots or Matplotlib is not installed.
    ValueError
        For an unknown kind or name, where shapes do not agree, or where no coordinate would be shown.
    """
    if kind not in _MOST:
        raise ValueError(f"kind should be one of {', '.join(map(repr, _MOST))}; got {kind!r}.")
    most = _MOST[kind] if max_coordinates is None else max_coordinates
    if most < 1:
        raise ValueError(f"max_coordinates should be at least 1; got {max_coordinates!r}.")
    need_matplotlib("plot_comparison")
    ours, theirs = _posterior(draws, "draws"), _posterior(reference, "reference")
    columns = _columns(ours, theirs, var_names)
    shown = _most_different(columns, most)
    both = _paired({name: columns[name] for name in shown})
    plots = arviz_plots("plot_comparison")
    figure = {"figsize": _size(kind, len(shown)), "figsize_units": "inches"}
    is_matplotlib = by_matplotlib(options)
    of_matplotlib = {"layout": "constrained"} if is_matplotlib else {}
    chosen = {"figure_kwargs": {**figure, **of_matplotlib}, **options}
    plot: Any = {"forest": _forest, "dist": _dist, "pair": _pair}[kind](plots, both, chosen)
    plot.add_legend("model", title="", **({"loc": "outside lower center", "ncols": 2} if is_matplotlib else {}))
    if len(shown) < len(columns):
        plot.add_title(f"{len(shown)} of {len(columns):,} coordinates: those that differ most")
    return plot


# --- the kinds ---


def _forest(plots: ModuleType, both: dict[str, xr.DataTree], chosen: dict[str, Any]) -> Any:
    longest = max(len(str(name)) for name in both[_OURS]["posterior"].data_vars)
    names = float(np.clip(_NAME_CHARACTER * longest, 0.5, 0.6 * _WIDTH))
    chosen = {**chosen, "figure_kwargs": {"width_ratios": [names, _WIDTH - names], **chosen["figure_kwargs"]}}
    plot = plots.plot_forest(both, **{"combined": True, "visuals": {"ticklabels": False}, **chosen})
    if plot.backend == "matplotlib":
        labels, intervals = (plot.viz["plot"].sel(column=column).item() for column in ("labels", "forest"))
        labels.set_axis_off()
        at = np.concatenate([line.get_ydata() for line in intervals.lines])
        intervals.set_ylim(at.min() - _MARGIN, at.max() + _MARGIN)
    return plot


def _dist(plots: ModuleType, both: dict[str, xr.DataTree], chosen: dict[str, Any]) -> Any:
    return plots.plot_dist(both, **{"kind": "kde", "visuals": {"point_estimate_text": False}, **chosen})


def _pair(plots: ModuleType, both: dict[str, xr.DataTree], chosen: dict[str, Any]) -> Any:
    defaults = {
        "facet_dims": ["__variable__"],
        "aes": {"color": ["model"]},
        "marginal_kind": "kde",
        # Points of the one would hide those of the other.
        "visuals": {"scatter": False, "contour": True},
        "aes_by_visuals": {"contour": ["color"]},
        "levels": [0.5, 0.95],
    }
    return plots.plot_pair(both, **{**defaults, **chosen})


def _size(kind: Kind, n: int) -> tuple[float, float]:
    """Return width and height of the figure, inches."""
    if kind == "forest":
        return _WIDTH, 1.0 + 0.28 * n
    if kind == "dist":
        n_columns = min(n, 4)
        return max(2.4 * n_columns, 4.5), 0.5 + 1.9 * -(-n // n_columns)
    side = float(np.clip(1.8 * n, 4.0, 12.0))
    return side, side


def arviz_plots(function: str) -> ModuleType:
    """Return ``arviz_plots``; raise ImportError where it is not installed."""
    try:
        import arviz_plots as plots
    except ImportError as error:
        raise ImportError(f"{function} needs arviz-plots: pip install arviz-plots") from error
    return plots


# --- what to draw ---


def _posterior(draws: object, name: str) -> xr.Dataset:
    found = draws
    if isinstance(draws, xr.DataTree):
        found = draws["posterior"].to_dataset() if "posterior" in draws.children else draws.to_dataset()
    if not isinstance(found, xr.Dataset) or not {"chain", "draw"} <= set(found.dims):
        raise ValueError(
            f"{name} should be a DataTree with a group posterior, or its Dataset, with dims chain and draw; got a "
            f"{type(draws).__name__}. For InferenceData of older ArviZ: xarray.open_datatree of its NetCDF file."
        )
    return found


def _columns(
    ours: xr.Dataset, theirs: xr.Dataset, var_names: str | Sequence[str] | None
) -> dict[str, tuple[Array, Array]]:
    """Return the draws of both by coordinate: all of one variable, or those that are named."""
    wanted = [var_names] if isinstance(var_names, str) else var_names
    variables = {str(name) for name in ours.data_vars} & {str(name) for name in theirs.data_vars}
    names = sorted(variables, key=list(map(str, ours.data_vars)).index) if wanted is None else list(wanted)
    found: dict[str, tuple[Array, Array]] = {}
    for name in names:
        variable = name if name in variables else name.partition("[")[0]
        if variable not in variables:
            raise ValueError(
                f"{name!r} is not among the variables that both q and the reference have: "
                f"{', '.join(sorted(map(repr, variables))) or 'none'}."
            )
        of = _coordinates(ours[variable], theirs[variable])
        if name != variable and name not in of:
            raise ValueError(f"{variable!r} has no coordinate {name!r}; there are {', '.join(list(of)[:5])}, ...")
        found |= of if name == variable else {name: of[name]}
    if not found:
        raise ValueError("There is no coordinate to show: q and the reference have no variable in common.")
    return found


def _coordinates(ours: xr.DataArray, theirs: xr.DataArray) -> dict[str, tuple[Array, Array]]:
    """Return the draws of each coordinate of one variable, by its label."""
    left, right = ours.transpose("chain", "draw", ...), theirs.transpose("chain", "draw", ...)
    if left.shape[2:] != right.shape[2:]:
        raise ValueError(
            f"{ours.name!r} has shape {left.shape[2:]} in q and {right.shape[2:]} in the reference: they are not of "
            "the same model."
        )
    labels = _labels(left)
    columns = (np.asarray(a, dtype=np.float64).reshape(a.shape[0] * a.shape[1], -1) for a in (left, right))
    return {label: pair for label, *pair in zip(labels, *(c.T for c in columns), strict=True)}  # type: ignore[misc]


def by_matplotlib(options: dict[str, Any]) -> bool:
    """Tell whether arviz-plots draws with Matplotlib, given its options."""
    from arviz_base import rcParams  # .8 s to import, with JAX

    return bool((options.get("backend") or rcParams["plot.backend"]) == "matplotlib")


def columns_of(posterior: xr.Dataset) -> dict[str, Array]:
    """Return the draws of each coordinate of all variables, one chain after the other, by its label."""
    found: dict[str, Array] = {}
    for variable in posterior.data_vars.values():
        draws = variable.transpose("chain", "draw", ...)
        columns = np.asarray(draws, dtype=np.float64).reshape(draws.shape[0] * draws.shape[1], -1)
        found |= dict(zip(_labels(draws), columns.T, strict=True))
    return found


def _labels(variable: xr.DataArray) -> list[str]:
    """Return the names of coordinates in C order: ``beta[age]``, or ``beta`` of a scalar."""
    dims = variable.dims[2:]
    if not dims:
        return [str(variable.name)]
    values = [variable[dim].values if dim in variable.coords else np.arange(variable.sizes[dim]) for dim in dims]
    return [
        f"{variable.name}[{', '.join(str(v[i]) for v, i in zip(values, at, strict=True))}]"
        for at in np.ndindex(*variable.shape[2:])
    ]


def _most_different(columns: dict[str, tuple[Array, Array]], n: int) -> list[str]:
    """Return the names of the ``n`` coordinates in which the two differ most, in their order."""
    names = list(columns)
    if len(names) <= n:
        return names
    moments = np.array([[(x.mean(), x.std()) for x in columns[name]] for name in names])
    (mean, sd), (reference_mean, reference_sd) = moments[:, 0].T, moments[:, 1].T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sd / reference_sd
        score = 0.5 * (ratio**2 - 1.0 + ((mean - reference_mean) / reference_sd) ** 2) - np.log(ratio)
    order: NDArray[np.intp] = np.argsort(-np.nan_to_num(score), kind="stable")[:n]
    return [names[i] for i in np.sort(order)]


def _paired(columns: dict[str, tuple[Array, Array]]) -> dict[str, xr.DataTree]:
    """Return both as trees of one chain with the same number of draws, so that arviz-plots can put them together."""
    n = min(min(len(x) for x in pair) for pair in columns.values())
    trees = {}
    for which, label in enumerate((_OURS, _REFERENCE)):
        data = {name: (("chain", "draw"), _thinned(pair[which], n)[None]) for name, pair in columns.items()}
        dataset = xr.Dataset(data, coords={"chain": [0], "draw": np.arange(n)})
        trees[label] = xr.DataTree.from_dict({"posterior": dataset})
    return trees


def _thinned(values: Array, n: int) -> Array:
    """Return ``n`` evenly spaced values."""
    return values[np.linspace(0, len(values) - 1, n).round().astype(np.intp)]


#: Told apart by colour-blind readers, too.
_HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#5e3c99")
#: Of components beyond the hues.
_LINES = ("-", "--", ":")
_TOTAL = "0.25"
#: Probability within the ellipses of a component.
_LEVELS = (0.5, 0.95)
#: Components of less weight do not widen the axes.
_LIGHT = 0.01
#: Opacity of a component of no weight; of others, it is as the square root of the weight.
_FAINTEST = 0.3
#: Standard deviations of each component that the axes reach to.
_REACH = 3.2
_N_ANGLES, _N_GRID = 181, 121
#: Entries of the legend, and characters of a label, at most.
_MAX_ENTRIES, _MAX_CHARACTERS = 8, 22


class _Panels(NamedTuple):
    """What is drawn, in the coordinates that are shown."""

    #: shape (n_components,).
    weights: Array
    #: shape (n_components, n_coordinates).
    means: Array
    #: shape (n_components, n_coordinates, n_coordinates).
    covs: Array
    #: shape (n_draws, n_coordinates).
    draws: Array
    #: Responsibilities; shape (n_draws, n_components).
    shares: Array
    labels: list[str]

    @property
    def sds(self) -> Array:
        return np.sqrt(np.diagonal(self.covs, axis1=1, axis2=2))

    def limits(self, i: int) -> tuple[float, float]:
        """Return the ends of the axis of a coordinate."""
        shown = self.weights >= min(_LIGHT, self.weights.max())
        reach = _REACH * self.sds[shown, i]
        return float((self.means[shown, i] - reach).min()), float((self.means[shown, i] + reach).max())


def plot_components(
    q: MixtureState,
    layout: Layout,
    draws: Array,
    var_names: str | Sequence[str] | None = None,
    *,
    max_coordinates: int = 6,
    figure: Figure | None = None,
) -> AxesArray:
    """Plot the components of a mixture, over draws of it, for each pair of coordinates.

    On the unconstrained scale, where the ellipses of components are exact: each has two, with half and 95 % of its
    probability. On the diagonal are the marginal densities: of components times their weights, and their sum. The
    colour of a draw is that of the components mixed by its responsibilities.

    Parameters
    ----------
    q : MixtureState
    layout : Layout
    draws : ndarray, shape (n_draws, n_dim)
        Of q; no row for none.
    var_names : str or sequence of str, optional
        Random variables (``sd``), their unconstrained values (``sd_log__``) or single coordinates (``beta[3]``).
        Default: all.
    max_coordinates : int, default 6
        Of more, those are shown in which components differ most, as the figure then says: by their mean
        Kullback-Leibler divergence from the Gaussian with the mean and variance of q there.
    figure : matplotlib.figure.Figure or SubFigure, optional
        To draw into; by default one is made.

    Returns
    -------
    ndarray of matplotlib.axes.Axes, shape (n_coordinates, n_coordinates)
        None above the diagonal.

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.
    ValueError
        If a name is unknown, or no coordinate would be shown.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.families import DiagonalState, MixtureState
    >>> from pymc_ngvi.graphs.layout import Layout, Variable
    >>> layout = Layout((Variable("x", "x", (2,), slice(0, 2), None),), {})
    >>> q = MixtureState.of([DiagonalState(np.full(2, m), np.ones(2)) for m in (-2.0, 2.0)])
    >>> axes = plot_components(q, layout, np.empty((0, 2)))
    >>> axes[1, 0].get_xlabel(), axes[1, 0].get_ylabel()
    ('x[0]', 'x[1]')
    """
    pyplot = need_matplotlib("plot_components")
    from matplotlib import colors

    index = np.arange(layout.n_dim) if var_names is None else indices_of(layout, var_names)
    n_of = len(index)
    index = _most_apart(q, index, max_coordinates)
    if not len(index):
        raise ValueError("There is no coordinate to show: var_names and max_coordinates should leave one at least.")
    panels = _panels(q, layout, draws, index)
    n = len(index)
    if figure is None:
        side = min(2.0 + 1.7 * n, 12.0)
        figure = pyplot.figure(figsize=(6.5, 3.2) if n == 1 else (side, side), layout="constrained")
    axes = figure.subplots(n, n, squeeze=False)
    styles: list[dict[str, Any]] = [
        {
            "color": _HUES[c % len(_HUES)],
            "linestyle": _LINES[c // len(_HUES) % len(_LINES)],
            "alpha": max(_FAINTEST, float(np.sqrt(weight / q.weights.max()))),
        }
        for c, weight in enumerate(q.weights)
    ]
    mixed = np.clip(panels.shares @ np.array([colors.to_rgb(style["color"]) for style in styles]), 0.0, 1.0)
    for i in range(n):
        for j in range(n):
            if j > i:
                axes[i, j].remove()
                axes[i, j] = None
                continue
            if i == j:
                _draw_densities(axes[i, i], panels, i, styles)
            else:
                _draw_pair(axes[i, j], panels, j, i, styles, mixed)
            _trim(axes[i, j], panels, i, j)
    _write(figure, axes, q.weights, styles, n_of)
    return axes


# --- what to draw ---


def _most_apart(q: MixtureState, index: NDArray[np.intp], n: int) -> NDArray[np.intp]:
    """Return the ``n`` coordinates in which components differ most, in their order."""
    # E_c[KL(q_c | N)] with N of the mean and variance of q: the quadratic terms sum to 1/2 - 1/2.
    score = np.log(q.sd()[index]) - q.weights @ np.log(q.sds[:, index])
    return index[np.sort(np.argsort(-score, kind="stable")[: max(n, 0)])]


def _panels(q: MixtureState, layout: Layout, draws: Array, index: NDArray[np.intp]) -> _Panels:
    covs = np.array([MixtureState.of([c]).cov_block(index) for c in q.components])
    shares = q.responsibilities(draws) if len(draws) else np.empty((0, q.n_components))
    return _Panels(q.weights, q.means[:, index], covs, draws[:, index], shares, [layout.label(int(i)) for i in index])


def _ellipses(mean: Array, cov: Array) -> Array:
    """Return points on the ellipses of a Gaussian in two coordinates, (n_levels, n_angles, 2)."""
    factor = cholesky(cov)
    if factor is None:  # a line
        values, vectors = np.linalg.eigh(cov)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))
    angles = np.linspace(0.0, 2.0 * np.pi, _N_ANGLES)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ factor.T
    radii = np.sqrt(-2.0 * np.log1p(-np.array(_LEVELS)))
    return mean + radii[:, None, None] * circle


def _densities(panels: _Panels, i: int) -> tuple[Array, Array]:
    """Return points along a coordinate, and the density of each component there times its weight."""
    mean, sd = panels.means[:, i], panels.sds[:, i]
    near = mean[:, None] + sd[:, None] * np.linspace(-4.0, 4.0, _N_GRID)
    x = np.unique(np.concatenate([near.ravel(), np.linspace(*panels.limits(i), _N_GRID)]))
    z = (x - mean[:, None]) / sd[:, None]
    return x, (panels.weights / sd)[:, None] * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)


# --- drawing ---


def _draw_densities(ax: Axes, panels: _Panels, i: int, styles: list[dict[str, Any]]) -> None:
    x, densities = _densities(panels, i)
    ax.plot(x, densities.sum(axis=0), color=_TOTAL, linewidth=2.2)
    for density, style in zip(densities, styles, strict=True):
        ax.fill_between(x, density, color=style["color"], alpha=0.18 * style["alpha"], linewidth=0)
        ax.plot(x, density, linewidth=1.2, **style)
    ax.set_ylim(bottom=0.0)


def _draw_pair(ax: Axes, panels: _Panels, i: int, j: int, styles: list[dict[str, Any]], mixed: Array) -> None:
    """Draw coordinate ``j`` over ``i``."""
    ax.scatter(panels.draws[:, i], panels.draws[:, j], c=mixed, s=5, alpha=0.35, linewidths=0, rasterized=True)
    pair = np.array([i, j])
    for mean, cov, style in zip(panels.means, panels.covs, styles, strict=True):
        for width, line in zip((1.6, 0.9), _ellipses(mean[pair], cov[np.ix_(pair, pair)]), strict=True):
            ax.plot(*line.T, linewidth=width, **style)
    ax.set_ylim(panels.limits(j))


def _trim(ax: Axes, panels: _Panels, row: int, column: int) -> None:
    """Set limits, and leave ticks and names at the outer sides only."""
    ax.set_xlim(panels.limits(column))
    ax.tick_params(labelsize=FONT_SIZE)
    ax.locator_params(nbins=4, axis="x")
    last = row == len(panels.labels) - 1
    ax.tick_params(axis="x", labelbottom=last)
    if last:
        ax.set_xlabel(_short(panels.labels[column]), fontsize=FONT_SIZE + 1)
    if row == column:
        ax.set_yticks([])
        return
    ax.locator_params(nbins=4, axis="y")
    ax.tick_params(axis="y", labelleft=column == 0)
    if column == 0:
        ax.set_ylabel(_short(panels.labels[row]), fontsize=FONT_SIZE + 1)


def _short(label: str) -> str:
    return label if len(label) <= _MAX_CHARACTERS else f"{label[: _MAX_CHARACTERS - 9]}…{label[-8:]}"


def _write(figure: Figure, axes: AxesArray, weights: Array, styles: list[dict[str, Any]], n_of: int) -> None:
    """Write which line is which component, what the scale is, and, where not all coordinates are shown, which are."""
    from matplotlib.lines import Line2D

    n = len(axes)
    title = ["Components of q: weights", "unconstrained scale"]
    title += ["ellipses: 50 % and 95 %"] * (n > 1)
    title += [f"{n} of {n_of:,} coordinates:", "where components differ most"] * (n < n_of)
    listed = np.sort(np.argsort(-weights, kind="stable")[:_MAX_ENTRIES])
    handles = [Line2D([], [], linewidth=2.2, label=f"{c}: {_weight(weights[c])}", **styles[c]) for c in listed]
    if len(listed) < len(weights):
        handles.append(Line2D([], [], linewidth=0, label=f"{len(weights) - len(listed)} more"))
    handles.append(Line2D([], [], color=_TOTAL, linewidth=2.2, label="their sum"))
    # One panel leaves no corner free.
    place, where = (
        (axes[0, 0], {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)})
        if n == 1
        else (figure, {"loc": "upper right"})
    )
    legend = place.legend(
        handles=handles,
        title="\n".join(title),
        fontsize=FONT_SIZE,
        title_fontsize=FONT_SIZE,
        alignment="left",
        frameon=False,
        **where,
    )
    legend.set_in_layout(n == 1)


def _weight(weight: float) -> str:
    return f"{weight:.3f}" if weight >= 0.0005 else f"{weight:.0e}"


#: Elements that are shown, at most.
_MOST_SHOWN = 6
#: Height of a row and of the legend, inches.
_ROW, _LEGEND = 1.9, 0.8


def plot_sensitivity(tree: xr.DataTree, table: pd.DataFrame, **options: Any) -> Any:
    """Plot marginal distributions with prior and likelihood raised to powers; see `plot_prior_sensitivity`."""
    need_matplotlib("plot_prior_sensitivity")
    plots = arviz_plots("plot_prior_sensitivity")
    columns = columns_of(tree["posterior"].to_dataset())
    order = np.argsort(-np.nan_to_num(table["prior"].to_numpy()), kind="stable")[:_MOST_SHOWN]
    names = list(columns)
    shown = {names[i]: columns[names[i]] for i in np.sort(order)}
    n = len(tree["log_prior"]["draw"])
    dataset = xr.Dataset(
        {name: (("chain", "draw"), values[None]) for name, values in shown.items()},
        coords={"chain": [0], "draw": np.arange(n)},
    )
    both = {name: tree[name].to_dataset() for name in ("log_prior", "log_likelihood")}
    is_matplotlib = by_matplotlib(options)
    figure = {"figsize": (_WIDTH, _LEGEND + _ROW * len(shown)), "figsize_units": "inches"}
    figure |= {"layout": "constrained"} if is_matplotlib else {}
    one = xr.DataTree.from_dict({"posterior": dataset, **both})
    plot = plots.plot_psense_dist(one, **{"figure_kwargs": figure, **options})
    if is_matplotlib:
        for legend in plot.viz["figure"].item().legends:  # which would hide the first row
            legend.remove()
        plot.add_legend(["alpha"], title="power", loc="outside lower center", ncols=3)
    if len(shown) < len(columns):
        plot.add_title(f"{len(shown)} of {len(columns):,} elements: those that depend most on the prior")
    return plot
