"""What the pictures have in common: colours, sizes of letters, wrapped titles."""

import textwrap

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from numpy.typing import NDArray

if TYPE_CHECKING:  # Matplotlib need not be installed
    import matplotlib.axes
    import matplotlib.figure

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
