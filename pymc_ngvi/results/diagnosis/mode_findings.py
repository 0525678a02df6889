"""What there is to say of modes beside the one that an approximation is at, in sentences."""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.fitting.modes.found import OtherMode
from pymc_ngvi.results.diagnosis.cures import Context
from pymc_ngvi.results.diagnosis.finding import Finding

#: Part of the mass at other modes from which on it counts; square of a standard deviation, relative, that it may add.
_MUCH, _WIDER = 0.02, 0.2
#: Coordinates that a sentence names at most; those that are farther apart than a part of the farthest.
_N_MODES_NAMED, _NEAR_FARTHEST = 3, 0.3


def of_modes(
    context: Context, mean: Array, sd: Array, modes: Sequence[OtherMode], *, has_symmetries: bool
) -> list[Finding]:
    """Say which modes a fit found beside its own, and that are not covered.

    Parameters
    ----------
    context : Context
    mean, sd : ndarray, shape (n_dim,)
        Of q.
    modes : sequence of OtherMode
    has_symmetries : bool
        Whether it was said already that modes are equal by symmetry.
    """
    modes = [mode for mode in modes if not (mode.is_equal and has_symmetries)]
    if not modes:
        return []
    total = sum(mode.share for mode in modes)
    shifts = np.array([(np.asarray(mode.q.mean()) - mean) / sd for mode in modes])
    added = np.array([mode.share for mode in modes]) @ shifts**2
    if total < _MUCH and added.max() < _WIDER:
        return []
    where = place_of(context.layout, np.asarray(modes[0].q.mean()), mean, sd)
    if len(modes) == 1:
        what = f"another mode, with {_percent(total)} of the mass, at {where}"
    else:
        what = f"{len(modes)} other modes, with {_percent(total)} of the mass, the largest at {where}"
    text = f"The posterior has {what}. q covers the one with {_percent(1.0 - total)}."
    return [Finding(text, context.mode_cure(), True)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def place_of(layout: Layout, point: Array, mean: Array, sd: Array) -> str:
    """Return the coordinates in which a place is farthest from q."""
    apart = np.abs(point - mean) / sd
    far = np.argsort(-apart)[:_N_MODES_NAMED]
    far = far[apart[far] > _NEAR_FARTHEST * apart[far[0]]]
    return ", ".join(f"`{layout.label(int(i))}` = {point[i]:.3g} (q: {mean[i]:.3g})" for i in far)
