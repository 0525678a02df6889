"""Fits from other modes: the best of all is kept, and it is noted which modes are left besides."""

import dataclasses

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from pymc_ngvi.core.climbs import tops
from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.types import FittedState, GaussianState, Rule, VariationalState
from pymc_ngvi.families import Maker
from pymc_ngvi.fitting.loop import LoopState
from pymc_ngvi.fitting.modes.climbs import MOST_NEWTON, Mode
from pymc_ngvi.fitting.modes.found import OtherMode, is_outside, shares
from pymc_ngvi.fitting.modes.search import FoundModes, ModeSearch, is_equal
from pymc_ngvi.fitting.starting import choose_start

#: Nats, and standard errors, that another fit has to gain.
_GAIN, _N_SE = 0.1, 3.0
#: Part of the mass, times the square of the distance in standard deviations, from which on a mode is told of; how many.
_LEAST_WEIGHT, _MOST_TOLD = 0.01, 8
#: Nats within which a mode has so much of the mass that a fit is worth while.
_LARGE = 4.0
#: Parts of the standard deviations about a mode that a fit from there begins with.
_PARTS = (1.0, 0.3)


class Ended(NamedTuple):
    """Where a fit has ended, and how good that is."""

    state: LoopState
    elbo: Elbo
    gap: float

    @property
    def q(self) -> GaussianState:
        """The approximation."""
        return cast(GaussianState, self.state.rule.q)


class Explored(NamedTuple):
    """What came of a search."""

    best: Ended
    #: Why that is not the first fit; empty where it is.
    sentence: str
    #: That are left besides.
    modes: tuple[OtherMode, ...]


def explored(
    search: ModeSearch,
    found: FoundModes,
    rule: Rule,
    family: Maker[FittedState],
    first: Ended,
    fit_from: Callable[[VariationalState], Ended | None],
) -> Explored:
    """Fit from the modes that were found."""
    ends, n_left = [first], found.n_fits
    images: list[tuple[VariationalState, int]] = []
    known: list[tuple[Mode, int]] = [] if found.home is None else [(found.home, 0)]
    left: list[VariationalState] = []
    largest = max([first.elbo.value, *(mode.log_mass for mode in found.modes)])
    for mode in found.modes:
        i = None if mode.is_start else next((i for other, i in known if is_equal(mode, other)), None)
        if i is not None:
            q: Any = ends[i].q
            about: Any = dataclasses.replace(q, location=mode.point)
            if n_left > 0 and about.n_dim > MOST_NEWTON:  # a mean may be far from the mode there
                n_left -= 1
                new = _fitted(search, rule, family, mode, fit_from)
                about = about if new is None or _among(search, ends, new.q) is not None else new.q
            images.append((about, i))
            continue
        i = _among(search, ends, mode.gaussian)
        # In many dimensions a mode of log p says little of the mass about it.
        is_small = mode.gaussian.n_dim <= MOST_NEWTON and mode.log_mass < largest - _LARGE
        if i is None and (n_left == 0 or is_small):
            left.append(mode.gaussian)
            continue
        if i is None:
            n_left -= 1
            new = _fitted(search, rule, family, mode, fit_from)
            i = None if new is None else _among(search, ends, new.q)
            if new is not None and i is None:
                i = len(ends)
                ends.append(new)
            elif new is not None and i is not None and is_better(new.elbo, ends[i].elbo):
                ends[i] = new
            if i is None or _among(search, ends, mode.gaussian) is None:
                home = mode if found.home is None else found.home
                points, heights = np.array([mode.point, home.point]), np.array([mode.logp, home.logp])
                if not mode.is_start and (home is mode or len(tops(search.density.logp, points, heights, 2)) > 1):
                    left.append(mode.gaussian)  # a fit does not stay there
                continue
        known.append((mode, i))
    best = 0
    for i, end in enumerate(ends):
        best = i if is_better(end.elbo, ends[best].elbo) else best
    sentence = "" if ends[best] is first else _sentence(found, ends[best].elbo.value - first.elbo.value)
    return Explored(ends[best], sentence, _shared(search, ends, best, left, images))


def is_better(new: Elbo, old: Elbo) -> bool:
    """Tell whether another fit has gained more than its error."""
    return bool(np.isfinite(new.value) and new.value - old.value > max(_GAIN, _N_SE * float(np.hypot(new.se, old.se))))


def _among(search: ModeSearch, ends: Sequence[Ended], other: VariationalState) -> int | None:
    """Return which of some ends has mass where another approximation is; None where none has."""
    covering = (
        i for i, end in enumerate(ends) if not is_outside(search.density, end.q, end.elbo.value, other, search.stream)
    )
    return next(covering, None)


def _fitted(
    search: ModeSearch,
    rule: Rule,
    family: Maker[FittedState],
    mode: Mode,
    fit_from: Callable[[VariationalState], Ended | None],
) -> Ended | None:
    about = mode.gaussian
    try:
        state = choose_start(rule, family, about.mean(), [part * about.sd() for part in _PARTS], search.density)
    except StartError:
        return None
    return fit_from(state)


def _shared(
    search: ModeSearch,
    ends: Sequence[Ended],
    best: int,
    left: Sequence[VariationalState],
    images: Sequence[tuple[VariationalState, int]],
) -> tuple[OtherMode, ...]:
    """Return all modes but the best with their shares; images of one have its own."""
    if len(ends) == 1 and not (left or images):
        return ()
    masses = shares(search.density, [*(end.q for end in ends), *left], search.stream)
    masses = masses / (1.0 + sum(float(masses[i]) for _, i in images))
    found = [OtherMode(end.q, float(masses[i])) for i, end in enumerate(ends) if i != best]
    found += [OtherMode(q, float(share)) for q, share in zip(left, masses[len(ends) :], strict=True)]
    found += [OtherMode(image, float(masses[i]), is_equal=i == best) for image, i in images]
    mean, sd = ends[best].q.mean(), ends[best].q.sd()
    weight = [mode.share * (1.0 + float(np.max((np.asarray(mode.q.mean()) - mean) ** 2 / sd**2))) for mode in found]
    counting = [mode for mode, w in zip(found, weight, strict=True) if w > _LEAST_WEIGHT]
    return tuple(sorted(counting, key=lambda mode: -mode.share)[:_MOST_TOLD])


def _sentence(found: FoundModes, gain: float) -> str:
    of_prior = f"{found.n_prior:,} draws of the prior and " if found.n_prior else ""
    return (
        f"A first fit ended at another mode. This one begins where the best of {of_prior}"
        f"{found.n_looked - found.n_prior:,} points about that fit led, and its ELBO is {gain:,.1f} nats higher."
    )
