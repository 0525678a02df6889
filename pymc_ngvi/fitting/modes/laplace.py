"""The highest mode that log p is found to have from points about the start, with the Gaussian about it.

It is found by gradients alone, without a fit: log p is climbed from several points at once, and then from the end of
the best climb by Newton's method, with curvatures from differences of gradients.
"""

import numpy as np

from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.modes.climbs import Mode, is_flat
from pymc_ngvi.fitting.modes.newton import abouts, climbed
from pymc_ngvi.mixtures.finite.search import ascend

#: Points from which log p is climbed, and how far from the start they are, at most, in each coordinate.
_N_POINTS, _APART = 8, 1.0


def highest_mode(density: ModelDensity, rng: np.random.Generator) -> Mode | None:
    """Return a mode with the Gaussian of Laplace's method; None where log p rises without end, or is flat.

    Parameters
    ----------
    density : ModelDensity
    rng : numpy.random.Generator
    """
    start = density.initial_point()
    apart = rng.uniform(-_APART, _APART, (_N_POINTS, len(start))) * np.linspace(0.0, 1.0, _N_POINTS)[:, None]
    with np.errstate(all="ignore"):
        ends, logp = ascend(density, start + apart)
        best = int(np.argmax(logp))
        if not np.isfinite(logp[best]):
            return None
        scale = np.ones((1, len(start)))
        end, height, grad = climbed(density, ends[best][None], scale)
        [about] = abouts(density, end, grad, scale)
        if about is None or not is_flat(density, about):
            return None
        return Mode(about, float(height[0]), float(height[0]) - float(about.log_density(end)[0]))
