"""Pictures: the rows of a model, and on which coordinates each of their predictors depends."""

import textwrap

from itertools import pairwise

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.density.row_kinds import PredictorKind, RowKind
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.results.plotting.style import FONT_SIZE, Axes, need_matplotlib, write_title
from pymc_ngvi.results.row_words import kinds_in_words
from pymc_ngvi.results.structure import ModelStructure

#: Cells along each side, about, and what a variable, or a kind of rows, has at least.
_N_CELLS, _LEAST_COLUMNS, _LEAST_ROWS = 240, 14, 26
#: Characters in a line of words.
_WIDTH = 48
_LINEAR, _ITSELF = "#1c5c9e", "#e08a1e"

Cells = NDArray[np.intp]


def plot_rows(structure: ModelStructure, ax: Axes | None = None) -> Axes:
    """Plot on which coordinates the rows of a model depend: a matrix of rows by coordinates, with words beside it.

    Kinds of rows with few rows, and variables with few coordinates, are drawn larger than they are; of many rows, some
    are drawn.

    Parameters
    ----------
    structure : ModelStructure
        With rows, as ``approx.structure`` has.
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
        Where the structure has no rows.
    """
    pyplot = need_matplotlib("plot_rows")
    from matplotlib import colors, patches

    if structure.rows is None or not structure.rows.kinds:
        raise ValueError("There are no rows to draw: no part of log p was found to be a sum over rows.")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(9.0, 4.6), layout="constrained")
    layout, groups = structure.layout, kinds_in_words(structure.rows.kinds, structure.layout)
    variables = [v for v in layout.variables if v.size]
    column, widths = _columns(layout)
    heights = _sizes([sum(kind.n for kind in kinds) for kinds, _ in groups], _LEAST_ROWS)
    bands = [_band(kinds, column, height) for (kinds, _), height in zip(groups, heights, strict=True)]
    image = np.concatenate(bands)
    ax.imshow(
        image,
        cmap=colors.ListedColormap(["white", _LINEAR, _ITSELF]),
        vmin=0,
        vmax=2,
        extent=(0, image.shape[1], len(image), 0),
        aspect="auto",
        interpolation="nearest",
    )
    across, down = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (widths, heights))
    for edge in across[1:-1]:
        ax.axvline(edge, color="0.6", linewidth=0.6)
    for edge in down[1:-1]:
        ax.axhline(edge, color="0.6", linewidth=0.6)
    names = [v.value_name + (f" ({v.size:,})" if v.size > 1 else "") for v in variables]
    ax.set_xticks([0.5 * (a + b) for a, b in pairwise(across)], names, fontsize=FONT_SIZE)
    for label in ax.get_xticklabels():
        label.set(rotation=35, ha="right", rotation_mode="anchor")
    ax.yaxis.tick_right()
    words = [textwrap.fill(text.replace("`", ""), _WIDTH) for _, text in groups]
    ax.set_yticks([0.5 * (a + b) for a, b in pairwise(down)], words, fontsize=FONT_SIZE)
    ax.tick_params(length=0)
    labels = {_LINEAR: "in a linear predictor", _ITSELF: "a predictor by itself"}
    keys = [patches.Patch(color=color, label=label) for color, label in labels.items()]
    ax.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, -0.02), frameon=False, fontsize=FONT_SIZE, ncols=2)
    n = sum(kind.n for kind in structure.rows.kinds)
    write_title(ax, f"Log p is a sum over {n:,} rows" if not structure.rows.rest else f"{n:,} rows", max_lines=1)
    return ax


def _columns(layout: Layout) -> tuple[Cells, list[int]]:
    """Return the first and last cell of each coordinate, (n_dim, 2), and the cells of each variable."""
    variables = [v for v in layout.variables if v.size]
    widths = _sizes([v.size for v in variables], _LEAST_COLUMNS)
    cells, start = np.zeros((layout.n_dim, 2), dtype=np.intp), 0
    for variable, width in zip(variables, widths, strict=True):
        edges = np.arange(variable.size + 1) * width // variable.size
        cells[variable.where, 0] = start + edges[:-1]
        cells[variable.where, 1] = start + np.maximum(edges[1:], edges[:-1] + 1)
        start += width
    return cells, widths


def _sizes(numbers: list[int], least: int) -> list[int]:
    """Return in how many cells each of several parts is drawn; small ones have a whole number for each element."""
    total = max(sum(numbers), 1)
    shares = [round(_N_CELLS * n / total) for n in numbers]
    return [share if share >= least else max(1, -(-least // n)) * n for n, share in zip(numbers, shares, strict=True)]


def _band(kinds: list[RowKind], columns: Cells, height: int) -> NDArray[np.int8]:
    """Return which cells count, (height, n_cells): 1 in a linear predictor, 2 as a predictor of its own."""
    image = np.zeros((height, int(columns.max(initial=0))), dtype=np.int8)
    ends = np.cumsum([kind.n for kind in kinds])
    rows = np.arange(height) * int(ends[-1]) // height
    which = np.searchsorted(ends, rows, side="right")
    for line, (row, at) in enumerate(zip(rows, which, strict=True)):
        kind = kinds[at]
        own = int(row - (ends[at] - kind.n))
        for predictor in kind.predictors:
            for first, last in columns[_coordinates(predictor, own)]:
                image[line, first:last] = 2 if predictor.is_coordinate else 1
    return image


def _coordinates(predictor: PredictorKind, row: int) -> Cells:
    index = np.broadcast_to(predictor.depends.index, predictor.number.shape)
    sets = predictor.depends.sets
    at = int(index[row])
    return np.asarray(sets.indices[sets.indptr[at] : sets.indptr[at + 1]], dtype=np.intp)
