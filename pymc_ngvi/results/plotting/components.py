"""A picture of a mixture: its components as ellipses over draws, pair by pair. Needs Matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import cholesky
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.families import MixtureState
from pymc_ngvi.results.convert import indices_of
from pymc_ngvi.results.plotting.style import FONT_SIZE, Axes, AxesArray, Figure, need_matplotlib

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
    index = _most_different(q, index, max_coordinates)
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


def _most_different(q: MixtureState, index: NDArray[np.intp], n: int) -> NDArray[np.intp]:
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
