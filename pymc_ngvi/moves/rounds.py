"""Chains are moved in rounds, each longer than the one before, until they have arrived or there are no more gradients.

Between rounds, coordinates and the length of trajectories are chosen anew by the draws of the last one. Within a round,
once its step size is found, nothing changes. The last two rounds, which have most of the draws, are kept.
"""

import functools
import math

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, HasGradient
from pymc_ngvi.moves.arrival import (
    Mixing,
    effective_sizes,
    height_above,
    is_far,
    mixing_of,
    most_trend,
    peak_size,
    worth_of,
)
from pymc_ngvi.moves.basins import MOST_STEPS, Basins, Climbs, Counted, are_apart, basins_among
from pymc_ngvi.moves.bridge import UNKNOWN, LogMass, ModeWeights, log_mass
from pymc_ngvi.moves.chains import Chains, Stretch
from pymc_ngvi.moves.coordinates import ChainCoordinates
from pymc_ngvi.moves.starts import starts_of
from pymc_ngvi.moves.verdict import LEAST_SIZE, MOST_OUTFLOW, MovedChecks

#: Points at which superchains begin.
N_STARTS = 8
#: Iterations of the first round; growth of rounds; rounds before draws are judged.
_FIRST, _GROWTH, _UNJUDGED = 16, 1.5, 2
#: Part of a round in which the step size is adapted, of the first one and of others, and iterations at most.
_FIRST_ADAPTING, _ADAPTING, _MOST_ADAPTING = 0.5, 0.25, 16
#: Numbers that are kept of a round, and of all, at most: of more, every few iterations, and fewer rounds.
_MOST_NUMBERS = 2**25
#: Part of the trajectories that may end in other basins, in the first round.
_FIRST_OUTFLOW = 0.05
#: Draws of which further quantities are computed.
_MOST_COMPUTED = 2**13

#: Quantities that are no coordinates, (n_draws, n_quantities), of draws.
type Quantities = Callable[[Array], Array]


class MovedChains(NamedTuple):
    """Where chains have come to: the draws that are kept, what was measured of them, and the log mass of all.

    The mass is NaN of chains in one mode: it is not needed there.
    """

    draws: Stretch
    checks: MovedChecks
    mass: LogMass = UNKNOWN


def moved_until_arrived(
    target: HasGradient,
    fits: Sequence[GaussianState],
    n_chains: int,
    rng: np.random.Generator,
    *,
    quantities: Quantities | None = None,
    label: Callable[[int], str] = str,
    may_go_on: Callable[[int], bool] = lambda n_gradients: True,
) -> MovedChains | None:
    """Move chains until they have arrived.

    Where they stay in several basins of log p, as many chains again begin in each, and do not leave it. The masses of
    the basins tell how much these weigh.

    Parameters
    ----------
    target : HasGradient
    fits : sequence of GaussianState
        The first one gives the coordinates; superchains begin at all of them.
    n_chains : int
        A multiple of 8.
    rng : numpy.random.Generator
    quantities : callable, optional
        What has to have arrived beside coordinates and log p.
    label : callable, optional
        Names coordinates, log p, and these, by number.
    may_go_on : callable, optional
        Tells whether another round may be taken, after which so many gradients would have been evaluated.

    Returns
    -------
    MovedChains or None
        None where log p is not finite around the fits.
    """
    starts = starts_of(target, fits, N_STARTS, rng)
    if starts is None:
        return None
    x, counted = np.repeat(starts, n_chains // N_STARTS, axis=0), Counted(target)
    whole = moving = _Moving(counted, [Chains(counted, ChainCoordinates.of(fits[0]), x, rng)])
    may_part, n_modes = True, 1
    while True:
        ended = None
        moving.advance()
        if moving.leaks:  # these are no basins
            moving, may_part, n_modes = whole, False, 1
        goes_on = may_go_on(counted.n + moving.n_next)
        if moving.is_judged or not goes_on:
            ended = _ended(moving, counted, quantities, label, rng)
            is_apart = may_part and any(are_apart(part.x) for part in moving.parts(moving.rounds[-1]))
            if is_apart and may_go_on(counted.n + moving.n_climbing):
                [joint] = whole.chains
                basins = basins_among(Climbs(counted, joint.coordinates, joint.step), moving.rounds[-1].x)
                n_modes = 1 if basins is None else len(basins)
                if basins is not None and n_modes > len(moving.chains):
                    parts = _parted(counted, basins, n_chains, rng)
                    if parts is not None and may_go_on(counted.n + parts.n_next):
                        moving = parts
                        continue
            if n_modes > len(moving.chains):
                ended = ended._replace(checks=replace(ended.checks, n_modes=n_modes, weights_size=0.0))
            if ended.checks.is_exact or not goes_on:
                return ended
        moving.refit()  # trajectories may be longer than those of the last round
        if ended is not None and not may_go_on(counted.n + moving.n_next):
            return ended


class _Moving:
    """Chains that are moved in rounds: all of them together, or those of each basin on their own.

    Parameters
    ----------
    counted : Counted
    chains : list of Chains
        As many of each basin.
    basins : Basins, optional
    """

    def __init__(self, counted: Counted, chains: list[Chains], basins: Basins | None = None) -> None:
        self._counted, self.chains, self.basins = counted, chains, basins
        self.rounds: list[Stretch] = []
        self._highest: list[float] = []
        self._n, self._done = _FIRST, 0

    @property
    def n_next(self) -> int:
        """Gradients of the next round."""
        return self._n * sum(chains.n_chains * chains.n_steps for chains in self.chains)

    @property
    def n_climbing(self) -> int:
        """Gradients that a look for basins takes at most."""
        return 2 * MOST_STEPS * sum(chains.n_chains for chains in self.chains)

    @property
    def is_judged(self) -> bool:
        """Whether there have been rounds enough."""
        return self._done > _UNJUDGED

    @property
    def outflow(self) -> float:
        """Part of the trajectories of the last round that would have left their basin, of the worst one."""
        return max(chains.outflow for chains in self.chains)

    @property
    def highest(self) -> float:
        """The highest log p on the way, in the rounds that are kept."""
        return max(self._highest[-len(self.rounds) :])

    @property
    def leaks(self) -> bool:
        """Whether that is too much; in the first round, in which chains begin far out, more is allowed."""
        return self.outflow > (MOST_OUTFLOW if self._done > 1 else _FIRST_OUTFLOW)

    def advance(self) -> None:
        """Move all chains by another round."""
        n, size = self._n, sum(chains.size for chains in self.chains)
        n_adapting = min(int((_ADAPTING if self._done else _FIRST_ADAPTING) * n), _MOST_ADAPTING)
        every = -(-2 * n * size // _MOST_NUMBERS)
        self._counted.highest = -math.inf
        of_basins = [chains.run(n, n_adapting=n_adapting, every=every) for chains in self.chains]
        self._n, self._done = int(_GROWTH * n), self._done + 1
        self._highest.append(self._counted.highest)
        self.rounds = _later([*self.rounds, Stretch(*map(_side_by_side, zip(*of_basins, strict=True)))])

    def parts(self, draws: Stretch) -> list[Stretch]:
        """Return the draws of each basin."""
        both = (np.split(array, len(self.chains), axis=1) for array in draws)
        return [Stretch(*arrays) for arrays in zip(*both, strict=True)]

    def refit(self) -> None:
        """Find coordinates and lengths by the last round, in which no chain should have stayed far from all others."""
        for chains, last in zip(self.chains, self.parts(self.rounds[-1]), strict=True):
            chains.join(np.flatnonzero(is_far(last.logp).all(axis=0) & (np.ptp(last.logp, axis=0) == 0.0)), N_STARTS)
            chains.refit(last.x.reshape(-1, last.x.shape[2]), worth_of(last.x, N_STARTS))


def _side_by_side(arrays: tuple[Array, ...]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)


def _parted(target: Counted, basins: Basins, n_chains: int, rng: np.random.Generator) -> _Moving | None:
    """Return chains that begin in each basin; None where log p is not finite in one of them."""
    chains = []
    for number, about in enumerate(basins.about):
        inside = functools.partial(basins.inside, number)
        starts = starts_of(target, [about], N_STARTS, rng, inside)
        if starts is None:
            return None
        chains.append(Chains(target, about, np.repeat(starts, n_chains // N_STARTS, axis=0), rng, inside))
    return _Moving(target, chains, basins)


def _later(rounds: list[Stretch]) -> list[Stretch]:
    """Return the last two rounds, which have most of the draws, or the last, where two can't be held."""
    later = rounds[-2:]
    while len(later) > 1 and sum(of.x.size for of in later) > _MOST_NUMBERS:
        later = later[1:]
    return later


def _ended(
    moving: _Moving,
    counted: Counted,
    quantities: Quantities | None,
    label: Callable[[int], str],
    rng: np.random.Generator,
) -> MovedChains:
    """Judge draws; the weights of basins, where nothing else is missing."""
    draws = Stretch(*(np.concatenate(arrays) for arrays in zip(*moving.rounds, strict=True)))
    parts = moving.parts(draws)
    height = height_above(draws.logp, moving.highest)
    judged = [
        replace(_judged(part, chains, quantities, label), height=height)
        for part, chains in zip(parts, moving.chains, strict=True)
    ]
    if moving.basins is None:
        return MovedChains(draws, replace(judged[0], n_gradients=counted.n))
    joined = _joined(judged, counted.n, moving.outflow)
    if not all(checks.is_exact for checks in judged):
        return MovedChains(draws, joined)
    masses = [
        log_mass(functools.partial(_log_p_inside, counted, moving.basins, number), chains.coordinates, *part, N_STARTS,
                 min(checks.bulk, checks.tail), rng)
        for number, (part, chains, checks) in enumerate(zip(parts, moving.chains, judged, strict=True))
    ]  # fmt: skip
    found = ModeWeights.of(masses)
    if not found.size:
        return MovedChains(draws, joined)
    checks = replace(
        joined,
        mode_weights=tuple(found.weights.tolist()),
        weight_errors=tuple(found.errors.tolist()),
        weights_size=found.size,
        n_gradients=counted.n,
    )
    return MovedChains(draws, checks, found.total)


def _log_p_inside(target: HasGradient, basins: Basins, number: int, x: Array) -> Array:
    """Return log p at points; -inf outside of a basin."""
    logp = target.logp_grad(x)[0]
    within = np.flatnonzero(np.isfinite(logp))
    result = np.full(len(x), -np.inf)
    within = within[basins.inside(number, x[within])]
    result[within] = logp[within]
    return result


def _joined(judged: list[MovedChecks], n_gradients: int, outflow: float) -> MovedChecks:
    """Return what was measured of all basins: the worst of each, and that nothing is known of weights."""
    worst = max(judged, key=lambda checks: checks.rhat)
    drifting = max(judged, key=lambda checks: checks.trend / checks.most_trend)
    bulk, tail = np.min([(checks.bulk, checks.tail) for checks in judged], axis=0).tolist()
    return replace(
        worst,
        trend=drifting.trend,
        most_trend=drifting.most_trend,
        bulk=bulk,
        tail=tail,
        n_chains=sum(checks.n_chains for checks in judged),
        n_starts=sum(checks.n_starts for checks in judged),
        n_gradients=n_gradients,
        acceptance=float(np.mean([checks.acceptance for checks in judged])),
        n_modes=len(judged),
        n_far=sum(checks.n_far for checks in judged),
        weights_size=0.0,
        outflow=outflow,
        diverging=max(checks.diverging for checks in judged),
        peak=min(checks.peak for checks in judged),
    )


def _judged(draws: Stretch, chains: Chains, quantities: Quantities | None, label: Callable[[int], str]) -> MovedChecks:
    """Judge draws of one basin; further quantities, and effective sizes, where nothing else is missing."""
    values = np.concatenate([draws.x, draws.logp[:, :, None]], axis=2)
    mixing = mixing_of(values, N_STARTS)
    checks = _checks(draws, mixing, chains, label)
    if not checks.is_settled:
        return checks
    sizes = effective_sizes(values, mixing.memory)
    if quantities is not None and min(sizes) >= LEAST_SIZE:
        further = _further(draws, quantities)
        of_further = mixing_of(further, N_STARTS)
        mixing = mixing.joined(of_further)
        bulk, tail = effective_sizes(further, of_further.memory)
        sizes = min(sizes[0], bulk), min(sizes[1], tail)
    return replace(_checks(draws, mixing, chains, label, sizes), peak=peak_size(draws.logp))


def _further(draws: Stretch, quantities: Quantities) -> Array:
    """Return further quantities of some of the draws, (n_draws, n_chains, n_quantities)."""
    n, n_chains, d = draws.x.shape
    some = draws.x[:: -(-n * n_chains // _MOST_COMPUTED)]
    return quantities(some.reshape(-1, d)).reshape(len(some), n_chains, -1)


def _checks(
    draws: Stretch,
    mixing: Mixing,
    chains: Chains,
    label: Callable[[int], str],
    sizes: tuple[float, float] = (math.nan, math.nan),
) -> MovedChecks:
    known = np.isfinite(mixing.memory)
    rhat = np.where(known, mixing.rhat, 1.0)
    n = int(known.sum())
    return MovedChecks(
        rhat=float(rhat.max()) if n else math.inf,
        trend=float(mixing.trend[known].max()) if n else math.inf,
        most_trend=most_trend(n),
        bulk=sizes[0],
        tail=sizes[1],
        n_quantities=n,
        n_draws=len(draws.x),
        n_chains=draws.x.shape[1],
        n_starts=N_STARTS,
        n_gradients=0,  # known to those who count
        acceptance=chains.acceptance,
        n_far=int(is_far(draws.logp).sum()),
        diverging=chains.diverging,
        slowest=label(int(rhat.argmax())),
    )
