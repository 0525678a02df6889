"""A picture of q beside reference draws, by arviz-plots."""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.plotting.style import need_matplotlib

if TYPE_CHECKING:  # arviz-plots need not be installed
    from arviz_plots.plot_collection import PlotCollection
    from arviz_plots.plot_matrix import PlotMatrix

type Plot = PlotCollection | PlotMatrix
Kind = Literal["forest", "dist", "pair"]
#: Coordinates that each kind shows unless more are asked for.
_MOST = {"forest": 40, "dist": 20, "pair": 5}
#: Width of a forest plot and, about, of a character of its names, inches.
_WIDTH, _CHARACTER = 7.0, 0.09
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
    names = float(np.clip(_CHARACTER * longest, 0.5, 0.6 * _WIDTH))
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
