"""Pictures: the sparsity of a model. Matplotlib is needed for these alone."""

import textwrap

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.results.plotting.style import FONT_SIZE, Axes, need_matplotlib, write_title
from pymc_ngvi.results.structure import ModelStructure, Part

#: Cells along each side at most, but for parts that are widened.
_N_CELLS = 250
#: Part of the side that each part has at least, so that names fit.
_LEAST_SHARE = 0.045
#: Parts of one kind that have names of their own, at most.
_N_PARTS = 6
#: Characters of a name at most.
_N_CHARACTERS = 24
#: Shade of cells with hardly any entry.
_LIGHTEST = 0.5
_HUE = "#1c5c9e"


class _Segment(NamedTuple):
    """A stretch of the axis.

    Parameters
    ----------
    name : str
    coordinates : ndarray of int
    bins : int
        Into which the coordinates are counted.
    repeats : int
        Cells for each bin.
    """

    name: str
    coordinates: NDArray[np.intp]
    bins: int
    repeats: int

    @property
    def n_cells(self) -> int:
        return self.bins * self.repeats


def plot_structure(structure: ModelStructure, ax: Axes | None = None) -> Axes:
    """Plot which entries of the Hessian of log p, and so of the precision, can differ from 0.

    Coordinates are in the order of the sparse family: block after block, then the border. Variables with few
    coordinates are drawn wider than they are; cells of many entries are shaded by the share of those that can differ
    from 0, and any cell with one of them can be seen.

    Parameters
    ----------
    structure : ModelStructure
    ax : matplotlib.axes.Axes, optional
        To draw into; by default a figure is made.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.graphs.layout import Layout, Variable
    >>> from pymc_ngvi.core.pattern import Pattern
    >>> layout = Layout((Variable("x", "x", (30,), slice(0, 30), None),), {})
    >>> chain = np.eye(30) + np.eye(30, k=1)
    >>> ax = plot_structure(ModelStructure(layout, Pattern.of(chain)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['x (25)', 'x separators (5)']
    """
    pyplot = need_matplotlib("plot_structure")
    from matplotlib import colors

    if ax is None:
        _, ax = pyplot.subplots(figsize=(5.5, 5.5), layout="constrained")
    segments = _segments(structure)
    shares = _shares(structure, segments)
    n_cells = len(shares)
    shades = np.where(shares > 0.0, _LIGHTEST + (1.0 - _LIGHTEST) * shares, 0.0)
    hues = colors.LinearSegmentedColormap.from_list("", ["white", _HUE])
    ax.imshow(shades, cmap=hues, vmin=0.0, vmax=1.0, extent=(0, n_cells, n_cells, 0), aspect="equal")
    ax.set_anchor("N")  # in the middle of a taller place, the title would not be reckoned with
    edges = np.concatenate([[0], np.cumsum([s.n_cells for s in segments])])
    for edge in edges[1:-1]:
        ax.axhline(edge, color="0.6", linewidth=0.6)
        ax.axvline(edge, color="0.6", linewidth=0.6)
    names = [_label(segment) for segment in segments]
    ax.set_yticks([0.5 * (a + b) for a, b in pairwise(edges)], names, fontsize=FONT_SIZE)
    ax.set_xticks([])
    ax.tick_params(length=0)
    _write(ax, structure)
    return ax


# --- the order along the axis ---


def _segments(structure: ModelStructure) -> list[_Segment]:
    """Return the parts in order, few enough for their names to fit."""
    local = [p for p in structure.parts if p.kind not in ("separators", "global")]
    border = [p for p in structure.parts if p.kind in ("separators", "global")]
    entries = [*_merged(structure, local), *_merged(structure, border)]
    per_cell = max(1.0, structure.n_dim / _N_CELLS)
    least = _LEAST_SHARE * structure.n_dim / per_cell
    segments = []
    for name, coordinates in entries:
        n = len(coordinates)
        if n <= least:
            segments.append(_Segment(name, coordinates, n, int(np.ceil(least / n))))
        else:
            segments.append(_Segment(name, coordinates, round(max(n / per_cell, least)), 1))
    return segments


def _merged(structure: ModelStructure, parts: list[Part]) -> list[tuple[str, NDArray[np.intp]]]:
    """Return names and coordinates of parts; the last of too many are one."""
    names = [_name(structure, p) for p in parts]
    coordinates = [p.coordinates for p in parts]
    if len(parts) > _N_PARTS:
        n = len(parts) - _N_PARTS + 1
        names = [*names[: _N_PARTS - 1], f"{n} more"]
        coordinates = [*coordinates[: _N_PARTS - 1], np.concatenate(coordinates[_N_PARTS - 1 :])]
    return list(zip(names, coordinates, strict=True))


def _name(structure: ModelStructure, part: Part) -> str:
    names = ", ".join(structure.layout.variables[v].value_name for v in part.variables)
    return f"{names} separators" if part.kind == "separators" else names


# --- the image ---


def _shares(structure: ModelStructure, segments: list[_Segment]) -> NDArray[np.float64]:
    """Return the share of entries that can differ from 0 in each cell, (n_cells, n_cells)."""
    sizes = np.concatenate([np.bincount(_bins(s), minlength=s.bins) for s in segments])
    cell, start = np.empty(structure.n_dim, dtype=np.intp), 0
    for segment in segments:
        cell[segment.coordinates] = start + _bins(segment)
        start += segment.bins
    pattern = structure.shown
    if pattern is None:
        shares = np.ones((start, start))
    else:
        below = pattern.off_diagonal
        lower = cell[pattern.rows] * start + cell[pattern.cols]
        upper = cell[pattern.cols[below]] * start + cell[pattern.rows[below]]
        counts = np.bincount(np.concatenate([lower, upper]), minlength=start * start).reshape(start, start)
        shares = counts / np.multiply.outer(sizes, sizes)
    repeats = np.repeat([s.repeats for s in segments], [s.bins for s in segments])
    return np.repeat(np.repeat(shares, repeats, axis=0), repeats, axis=1)


def _bins(segment: _Segment) -> NDArray[np.intp]:
    """Return the bin of each coordinate of a segment."""
    n = len(segment.coordinates)
    return np.arange(n) * segment.bins // n


# --- words ---


def _label(segment: _Segment) -> str:
    n = len(segment.coordinates)
    name = textwrap.shorten(segment.name, _N_CHARACTERS, placeholder=" …")
    return name if n == 1 else f"{name} ({n:,})"


def _write(ax: Axes, structure: ModelStructure) -> None:
    """Write the structure in words above the image, and what a cell is below it."""
    write_title(ax, structure.in_blocks.replace("`", ""), max_lines=4)
    per_cell = structure.n_dim / _N_CELLS
    if per_cell > 1.0:
        side = f"{per_cell:.2g}" if per_cell < 10.0 else f"{per_cell:,.0f}"
        ax.set_xlabel(f"shade: share of nonzero in about {side} × {side} entries", fontsize=FONT_SIZE)
