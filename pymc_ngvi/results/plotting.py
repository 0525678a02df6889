"""Pictures of a fit."""

import importlib

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from numpy.typing import NDArray
from scipy.special import boxcox, inv_boxcox, softmax

from pymc_ngvi.core.importance import khat_limit, pareto_khat, tail_length, weigh
from pymc_ngvi.core.messages import listed
from pymc_ngvi.core.status import format_elbo, format_gap
from pymc_ngvi.core.types import Array
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.distributions import Posterior, element_names, one_chain

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
LINE, OTHER, WARNING, FAINT = "#1c5c9e", "#d55e00", "#b03a2e", "0.45"
_SMALL = "small"


def module_for(function: str, module: str, name: str) -> ModuleType:
    """Return a module that a function needs; raise ImportError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{function} needs {name}: pip install {name.lower()}") from error


def need_matplotlib(function: str) -> ModuleType:
    """Return ``matplotlib.pyplot``."""
    module_for(function, "matplotlib", "Matplotlib")
    return importlib.import_module("matplotlib.pyplot")


def finish(ax: Axes, title: str) -> None:
    """Leave out the frame above and at the right, make letters small, and write a title."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=_SMALL)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_fontsize(_SMALL)
    ax.set_title(title, fontsize=_SMALL, loc="left", wrap=True)


#: How far below the last half of the iterations the axis of the ELBO reaches, in parts of its range.
_BELOW = 4.0
#: Iterations that are marked one by one.
_MAX_MARKED = 100
#: Least range of the ELBO that fills the axis, nats.
_LEAST_RANGE = 0.1
#: Gaps below this, nats, are not told apart.
_NO_GAP = 1e-4


def plot_fit(
    losses: Array, gaps: Array, record: FitRecord, *, tol: float | None = None, figure: Figure | None = None
) -> AxesArray:
    """Plot the ELBO, and the nats still to be gained, after each iteration of a fit.

    The axis of the ELBO reaches over what the last half of the iterations did: the first ones, which are often
    thousands of nats lower, are counted in a note.

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
        figure = pyplot.figure(layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    end, n = "at the end" if record.estimator == "quadrature" else "at the end, on fresh draws", record.n_iterations
    line = f"{record.status} after {n:,} iteration{'s'[: n != 1]}, gap {format_gap(record.gap, ' nats')}".capitalize()
    for ax, draw in zip(axes, panels, strict=True):
        draw(ax, losses, gaps, record, tol, end)
        finish(ax, "")
    axes[-1].set_xlabel("iteration")
    finish(axes[0], f"{line}. {record.sentence}" if record.remark else line)
    return axes


# --- the panels ---


def _draw_elbo(ax: Axes, losses: Array, gaps: Array, record: FitRecord, tol: float | None, end: str) -> None:
    elbos = np.where(np.isfinite(losses), -losses, np.nan)
    low, high = _limits(elbos, record.elbo.value)
    _draw(ax, elbos, "" if record.estimator == "quadrature" else "on the draws in use")
    if np.isfinite(record.elbo.value):
        label = f"{end}: {format_elbo(round(record.elbo.value, 2) + 0.0)}"  # no -0.00
        ax.axhline(record.elbo.value, color=OTHER, linestyle="--", label=label)
    ax.set_ylim(low, high)
    ax.set_ylabel("ELBO (nats)")
    ax.ticklabel_format(axis="y", useOffset=False)
    hidden = elbos < low
    note = f"{np.count_nonzero(hidden):,} of {len(elbos):,} lower, down to {np.nanmin(elbos):,.0f}"
    _write_legend(ax, "lower right", note if hidden.any() else "")


def _draw_gap(ax: Axes, losses: Array, gaps: Array, record: FitRecord, tol: float | None, end: str) -> None:
    known = np.array([*gaps, record.gap, np.nan if tol is None else tol])
    bottom = 0.5 * float(np.min(known, where=known > _NO_GAP, initial=max(np.nanmax(known), _NO_GAP)))
    ax.set_yscale("log")
    _draw(ax, np.where(np.isfinite(gaps), np.maximum(gaps, bottom), np.nan), "")
    if np.isfinite(record.gap):
        text = f"{end}: {format_gap(record.gap)}"
        ax.plot(len(gaps), max(record.gap, bottom), "D", color=OTHER, label=text, clip_on=False)
    if tol is not None:
        ax.axhline(tol, color=FAINT, linestyle=":", label=f"tolerance: {tol:.3g}")
    ax.set_ylim(bottom)
    ax.set_ylabel("still to be gained (nats)")
    _write_legend(ax, "upper right", "")


def _draw(ax: Axes, values: Array, label: str) -> None:
    few = len(values) <= _MAX_MARKED
    ax.plot(np.arange(1, len(values) + 1), values, "o-" if few else "-", color=LINE, markersize=2, label=label)


def _write_legend(ax: Axes, place: Literal["lower right", "upper right"], note: str) -> None:
    if ax.get_legend_handles_labels()[1]:
        ax.legend(
            title=note or None, fontsize=_SMALL, title_fontsize=_SMALL, alignment="left", frameon=False, loc=place
        )


# --- what to draw ---


def _limits(elbos: Array, last: float) -> tuple[float, float]:
    """Return the ends of the axis of the ELBO: those of the last half of the iterations, and some way beyond."""
    finite = elbos[np.isfinite(elbos)]
    # A few outliers of a noisy fit are no part of the range.
    ends = [*np.quantile(finite[len(finite) // 2 :], [0.01, 0.99]), *([last] if np.isfinite(last) else [])]
    span = max(max(ends) - min(ends), _LEAST_RANGE)
    low, high = max(min(ends) - _BELOW * span, finite.min()), max(ends)
    margin = max(high - low, _LEAST_RANGE) / 16
    return float(low - margin), float(high + margin)


#: Points along a curve; beyond weights that hardly differ, and beyond all draws, a factor; standard deviations of each
#: component that axes reach to.
_N_POINTS, _ROOM = 200, 3.0


def khat_title(posterior: Posterior) -> str | None:
    """Return the title of `plot_khat` for weights that are kept; None, for its own title, where there are none."""
    if (kept := posterior.distribution.kept_log_weights()) is None:
        return None
    found = weigh(kept)[1]
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
        _, ax = pyplot.subplots(layout="constrained")
    n = len(log_p)
    with np.errstate(invalid="ignore"):
        ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    weights = n * softmax(np.where(np.isfinite(ratio), ratio, -np.inf))  # over their mean; 0 where there is none
    shown = np.sort(weights[weights > 1.0 / n])[::-1]
    share = np.arange(1, len(shown) + 1) / n
    n_tail = min(tail_length(n), len(shown))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.plot(shown[n_tail - 1 :], share[n_tail - 1 :], color=LINE)
    ax.plot(shown[:n_tail], share[:n_tail], "o", color=LINE, markersize=2, label=f"weights; dots: tail of {n_tail:,}")
    if n_tail < len(shown) and np.median(shown[:n_tail]) > shown[n_tail]:
        _draw_tails(ax, shown[: n_tail + 1], n, khat)
    ax.set_ylim(0.5 / n, _ROOM)
    left, right = ax.get_xlim()
    ax.set_xlim(min(left, 1.0 / _ROOM), max(right, _ROOM))
    ax.set_xlabel("weight p/q, relative to the mean")
    ax.set_ylabel("share of the draws with a larger weight")
    note = f"largest weight: {weights.max() / n:.2g} of their sum"
    ax.legend(title=note, fontsize=_SMALL, title_fontsize=_SMALL, frameon=False, loc="upper right")
    finish(ax, weigh(log_p, log_q)[1].sentence() if title is None else title)
    return ax


def _draw_tails(ax: Axes, tail: Array, n: int, khat: float) -> None:
    """Draw Pareto tails that begin where the tail of the weights, from the largest, does."""
    start, excess = tail[-1], tail[:-1] - tail[-1]
    share = (len(tail) - 1) / n
    median = float(np.median(excess))
    right = start + np.geomspace(1e-2 * median, 2.0 * excess.max(), _N_POINTS)
    limit = khat_limit(n)
    kinds = [(limit, OTHER, "--", f"k = {limit:.2g}: limit of use"), (1.0, WARNING, ":", "k = 1: no mean")]
    if np.isfinite(khat):
        kinds.insert(0, (khat, "0.15", "-", f"k = {khat:.2f}: fitted"))
    for k, colour, style, label in kinds:
        # The median is scale (2^k - 1) / k, and the part that is larger (1 + k x / scale)^(-1/k).
        larger = 1.0 / inv_boxcox(boxcox(2.0, k) * (right - start) / median, k)
        ax.plot(right, share * larger, color=colour, linestyle=style, label=label)


type Plot = PlotCollection | PlotMatrix
Kind = Literal["forest", "dist", "pair"]
#: Probability within contours, and within the ellipses of a component.
_LEVELS = (0.5, 0.95)
#: Coordinates that each kind shows unless more are asked for, and its options.
_KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "forest": (40, {"combined": True}),
    "dist": (20, {"kind": "kde", "visuals": {"point_estimate_text": False}}),
    "pair": (
        5,
        {
            "facet_dims": ["__variable__"],
            "aes": {"color": ["model"]},
            "marginal_kind": "kde",
            # Points of the one would hide those of the other.
            "visuals": {"scatter": False, "contour": True},
            "aes_by_visuals": {"contour": ["color"]},
            "levels": list(_LEVELS),
        },
    ),
}


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
    if kind not in _KINDS:
        raise ValueError(f"kind should be one of {', '.join(map(repr, _KINDS))}; got {kind!r}.")
    most, defaults = _KINDS[kind]
    most = most if max_coordinates is None else max_coordinates
    if most < 1:
        raise ValueError(f"max_coordinates should be at least 1; got {max_coordinates!r}.")
    need_matplotlib("plot_comparison")
    ours, theirs = _posterior(draws, "draws"), _posterior(reference, "reference")
    columns = _columns(ours, theirs, var_names)
    shown = _largest(columns, _differences(columns), most)
    both = _paired(shown)
    plots = module_for("plot_comparison", "arviz_plots", "arviz-plots")
    is_matplotlib = by_matplotlib(options)
    figure = {"figure_kwargs": {"layout": "constrained"}} if is_matplotlib else {}
    plot: Any = getattr(plots, f"plot_{kind}")(both, **{**defaults, **figure, **options})
    plot.add_legend("model", title="", **({"loc": "outside lower center", "ncols": 2} if is_matplotlib else {}))
    if len(shown) < len(columns):
        plot.add_title(f"{len(shown)} of {len(columns):,} coordinates: those that differ most")
    return plot


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
    variables = [str(name) for name in ours.data_vars if name in theirs.data_vars]
    found: dict[str, tuple[Array, Array]] = {}
    for name in [var_names] if isinstance(var_names, str) else variables if var_names is None else var_names:
        variable = name if name in variables else name.partition("[")[0]
        if variable not in variables:
            raise ValueError(
                f"{name!r} is not among the variables that both q and the reference have: "
                f"{', '.join(sorted(map(repr, variables))) or 'none'}."
            )
        shapes = [of[variable].transpose("chain", "draw", ...).shape[2:] for of in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{variable!r} has shape {shapes[0]} in q and {shapes[1]} in the reference: they are not of "
                "the same model."
            )
        one, other = columns_of(ours[variable]), columns_of(theirs[variable]).values()
        of_both = dict(zip(one, zip(one.values(), other, strict=True), strict=True))
        if name != variable and name not in of_both:
            raise ValueError(f"{variable!r} has no coordinate {name!r}; there are {listed(list(of_both), '{}')}.")
        found |= of_both if name == variable else {name: of_both[name]}
    if not found:
        raise ValueError("There is no coordinate to show: q and the reference have no variable in common.")
    return found


def by_matplotlib(options: dict[str, Any]) -> bool:
    """Tell whether arviz-plots draws with Matplotlib, given its options."""
    from arviz_base import rcParams  # 0.8 s to import, with JAX

    return bool((options.get("backend") or rcParams["plot.backend"]) == "matplotlib")


def columns_of(*variables: xr.DataArray) -> dict[str, Array]:
    """Return the draws of each coordinate of variables, one chain after the other, by its label."""
    found: dict[str, Array] = {}
    for variable in variables:
        draws = variable.transpose("chain", "draw", ...)
        columns = np.asarray(draws, dtype=np.float64).reshape(draws.shape[0] * draws.shape[1], -1)
        found |= dict(zip(element_names(draws, 2), columns.T, strict=True))
    return found


def _differences(columns: dict[str, tuple[Array, Array]]) -> Array:
    """Return by how much the two differ in each coordinate."""
    moments = np.array([[(x.mean(), x.std()) for x in pair] for pair in columns.values()])
    (mean, sd), (reference_mean, reference_sd) = moments[:, 0].T, moments[:, 1].T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sd / reference_sd
        return np.asarray(0.5 * (ratio**2 - 1.0 + ((mean - reference_mean) / reference_sd) ** 2) - np.log(ratio))


def _largest[Column](columns: dict[str, Column], score: Array, n: int) -> dict[str, Column]:
    """Return the ``n`` coordinates of the largest scores, in their order."""
    names = list(columns)
    return {names[i]: columns[names[i]] for i in np.sort(np.argsort(-np.nan_to_num(score), kind="stable")[:n])}


def _paired(columns: dict[str, tuple[Array, Array]]) -> dict[str, xr.DataTree]:
    """Return both as trees of one chain with the same number of draws, so that arviz-plots can put them together."""
    n = min(min(len(x) for x in pair) for pair in columns.values())
    trees = {}
    for which, label in enumerate(("ngvi", "reference")):
        draws = {name: pair[which] for name, pair in columns.items()}
        # Of the longer of the two, evenly spaced draws.
        even = {name: x[np.linspace(0, len(x) - 1, n).round().astype(np.intp)] for name, x in draws.items()}
        trees[label] = xr.DataTree.from_dict({"posterior": one_chain(even)})
    return trees


#: Coordinates that are shown unless more are asked for.
N_COORDINATES = 6


def plot_sensitivity(tree: xr.DataTree, table: pd.DataFrame, **options: Any) -> Any:
    """Plot marginal distributions with prior and likelihood raised to powers; see `plot_prior_sensitivity`."""
    need_matplotlib("plot_prior_sensitivity")
    plots = module_for("plot_prior_sensitivity", "arviz_plots", "arviz-plots")
    columns = columns_of(*tree["posterior"].data_vars.values())
    shown = _largest(columns, table["prior"].to_numpy(), N_COORDINATES)
    both = {name: tree[name].to_dataset() for name in ("log_prior", "log_likelihood")}
    is_matplotlib = by_matplotlib(options)
    figure = {"layout": "constrained"} if is_matplotlib else {}
    one = xr.DataTree.from_dict({"posterior": one_chain(shown), **both})
    plot = plots.plot_psense_dist(one, **{"figure_kwargs": figure, **options})
    if is_matplotlib:
        for legend in plot.viz["figure"].item().legends:  # which would hide the first row
            legend.remove()
        plot.add_legend(["alpha"], title="power", loc="outside lower center", ncols=3)
    if len(shown) < len(columns):
        plot.add_title(f"{len(shown)} of {len(columns):,} elements: those that depend most on the prior")
    return plot
