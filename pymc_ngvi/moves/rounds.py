"""Chains are moved in rounds, each longer than the one before, until they have arrived or there are no more gradients.

Between rounds, coordinates and the length of trajectories are chosen anew by the draws of the last one. Within a round,
once its step size is found, nothing changes. The later half of the rounds, which has most of the draws, is kept.
"""

import math

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array, Density, GaussianState
from pymc_ngvi.moves.arrival import Mixing, effective_sizes, mixing_of, most_trend, worth_of
from pymc_ngvi.moves.chains import Chains, Stretch
from pymc_ngvi.moves.coordinates import ChainCoordinates
from pymc_ngvi.moves.starts import starts_of
from pymc_ngvi.moves.verdict import LEAST_SIZE, MovedChecks

#: Points at which superchains begin.
N_STARTS = 8
#: Iterations of the first round; growth of rounds; rounds before draws are judged.
_FIRST, _GROWTH, _UNJUDGED = 16, 1.5, 2
#: Part of a round in which the step size is adapted, of the first one and of others, and iterations at most.
_FIRST_ADAPTING, _ADAPTING, _MOST_ADAPTING = 0.5, 0.25, 16
#: Numbers that are kept of a round, and of all, at most: of more, every few iterations, and fewer rounds.
_MOST_NUMBERS = 2**25
#: Draws of which further quantities are computed.
_MOST_COMPUTED = 2**13

#: Quantities that are no coordinates, (n_draws, n_quantities), of draws.
type Quantities = Callable[[Array], Array]


class MovedChains(NamedTuple):
    """Where chains have come to: the draws that are kept, and what was measured of them."""

    draws: Stretch
    checks: MovedChecks


def moved_until_arrived(
    target: Density,
    fits: Sequence[GaussianState],
    n_chains: int,
    rng: np.random.Generator,
    *,
    quantities: Quantities | None = None,
    label: Callable[[int], str] = str,
    may_go_on: Callable[[int], bool] = lambda n_gradients: True,
) -> MovedChains | None:
    """Move chains until they have arrived.

    Parameters
    ----------
    target : Density
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
    x = np.repeat(starts, n_chains // N_STARTS, axis=0)
    chains = Chains(target, ChainCoordinates.of(fits[0]), x, rng)
    rounds: list[Stretch] = []
    n, done = _FIRST, 0
    while True:
        n_adapting = min(int((_ADAPTING if done else _FIRST_ADAPTING) * n), _MOST_ADAPTING)
        rounds.append(chains.run(n, n_adapting=n_adapting, every=-(-2 * n * x.size // _MOST_NUMBERS)))
        n, done = int(_GROWTH * n), done + 1
        rounds = _later(rounds, done)
        goes_on = may_go_on(chains.n_gradients + n * n_chains * chains.n_steps)
        if done > _UNJUDGED or not goes_on:
            draws = Stretch(*(np.concatenate(arrays) for arrays in zip(*rounds, strict=True)))
            ended = _ended(draws, chains, quantities, label)
            if ended.checks.is_exact or not goes_on:
                return ended
        last = rounds[-1].x
        chains.refit(last.reshape(-1, last.shape[2]), worth_of(last, N_STARTS))


def _later(rounds: list[Stretch], done: int) -> list[Stretch]:
    """Return the later half of the rounds, as many as can be held."""
    later = rounds[-done // 2 :]
    while len(later) > 1 and sum(of.x.size for of in later) > _MOST_NUMBERS:
        later = later[1:]
    return later


def _ended(draws: Stretch, chains: Chains, quantities: Quantities | None, label: Callable[[int], str]) -> MovedChains:
    """Judge draws; further quantities, and effective sizes, where nothing else is missing."""
    values = np.concatenate([draws.x, draws.logp[:, :, None]], axis=2)
    mixing = mixing_of(values, N_STARTS)
    checks = _checks(draws, mixing, chains, label)
    if not checks.is_settled:
        return MovedChains(draws, checks)
    sizes = effective_sizes(values, mixing.memory)
    if quantities is not None and min(sizes) >= LEAST_SIZE:
        further = _further(draws, quantities)
        of_further = mixing_of(further, N_STARTS)
        mixing = mixing.joined(of_further)
        bulk, tail = effective_sizes(further, of_further.memory)
        sizes = min(sizes[0], bulk), min(sizes[1], tail)
    return MovedChains(draws, _checks(draws, mixing, chains, label, sizes))


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
        n_gradients=chains.n_gradients,
        acceptance=chains.acceptance,
        slowest=label(int(rhat.argmax())),
    )
