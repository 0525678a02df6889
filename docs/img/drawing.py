"""What the scripts that make figures share: their look, and small files."""

import io

from matplotlib import pyplot
from PIL import Image

#: Of figures on pages, for ``pyplot.rc_context``.
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def save(figure, path, dpi, colours=64):
    """Write a figure in few colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi)
    Image.open(buffer).convert("RGB").quantize(colours).save(path, optimize=True)
    pyplot.close(figure)
