"""Moved posteriors: draws of a Gaussian are moved, as many chains at once, until they have arrived.

The Gaussian is a fit, or, where none comes before, that of Laplace's method at the highest mode that is found: chains
need to know no more than about where they are, and how wide.
"""

import functools

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.climbs import ascend
from pymc_ngvi.core.prices import Work
from pymc_ngvi.core.refusal import Failed, Reason, Unavailable
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer, Functionals, functionals_of
from pymc_ngvi.fitting.modes.search import Mode, ModeSearch, abouts, climbed, is_flat
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.moves.draws import MovedDraws
from pymc_ngvi.moves.rounds import moved_until_arrived
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart

# --- the highest mode that log p is found to have from points about the start, with the Gaussian about it ---
# It is found by gradients alone, without a fit: log p is climbed from several points at once, and then from the end of
# the best climb by Newton's method, with curvatures from differences of gradients.

#: Points from which log p is climbed, and how far from the start they are, at most, in each coordinate.
_N_POINTS, _APART = 8, 1.0


def highest_mode(density: ModelDensity, rng: np.random.Generator) -> Mode | None:
    """Return a mode with the Gaussian of Laplace's method; None where log p rises without end, or is flat."""
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


# --- moved posteriors: draws of a Gaussian are moved, as many chains at once, until they have arrived ---

#: Chains: where many points are evaluated at once, and where few are; points from which on they are many.
_MANY, _FEW, _AT_ONCE = 128, 64, 16
#: Iterations that are expected, and steps of a trajectory, over the fourth root of the dimension.
_ITERATIONS, _STEPS = 75.0, 2.5
#: How many times the gradients that are expected may be taken where no other limit is given.
_MOST = 120.0
#: Dimensions up to which it begins at a mode, whose curvature takes as many gradients.
_MOST_AT_MODE = 1_000
#: Chance that the chains arrive.
_CHANCE = 0.5
#: Seconds that a step of a chain takes beside its gradient, and for each coordinate of it.
_PER_STEP, _PER_COORDINATE = 2e-6, 5e-8


class ManyChains(NamedTuple):
    """How many chains there are to be, and in how many dimensions."""

    n_chains: int
    n_dim: int


class MovedKind(PosteriorKind[ManyChains]):
    """Draws of the fit, moved until they have arrived: for models that nothing else helps with."""

    name = "moved"
    may_come_first = True
    is_last = True

    def possible(self, density: ModelDensity) -> ManyChains:
        """Return how many chains: fewer where few points are evaluated at once."""
        if density.why_in_part:
            raise Unavailable(Reason.IN_PART, density.why_in_part)
        if density.is_sharded:
            raise Unavailable(Reason.IN_PART, "its data are in shards, and each step would ask all of them")
        is_few = isinstance(density, LogDensity) and density.batch_size < _AT_ONCE
        return ManyChains(_FEW if is_few else _MANY, density.n_dim)

    def comes_first(self, found: ManyChains, *, by_rows: bool) -> bool:
        """Tell whether a Gaussian fit takes draws: with exact expectations, it is had at once, and seldom far off."""
        return not by_rows and found.n_dim <= _MOST_AT_MODE

    def chance(self, found: ManyChains) -> float:
        """Return that of chains that arrive."""
        return _CHANCE

    def seconds(self, found: ManyChains, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what is expected of a fit that is not far off."""
        return _n_gradients(found) * _each(density)

    def run(self, start: PosteriorStart, found: ManyChains, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior, if the chains have arrived."""
        density, each = start.density, _each(start.density)
        expected = _n_gradients(found)
        most = _MOST * expected
        fits = _at_modes(density, start.seed) if start.q is None else [start.q, *start.others]
        functionals, before = functionals_of(density, Constrainer.of(density)), work.spent
        ended = moved_until_arrived(
            density,
            fits,
            found.n_chains,
            np.random.default_rng(start.seed),
            quantities=None if functionals is None else functools.partial(_values_of, functionals),
            label=functools.partial(_label, density, functionals),
            may_go_on=lambda n: n <= most and work.may_take(before + n * each),
            # While rounds are short, coordinates may still be found in which there are few steps.
            may_need=lambda n_next, n: n_next <= expected or (n <= most and before + n * each <= work.most),
        )
        if ended is None:
            raise Failed(Reason.HOPELESS, "log p is not finite around where chains would begin")
        checks = ended.checks
        if not checks.tells_limits:
            raise Failed(
                Reason.NOT_PASSED, f"moved draws have not arrived ({checks.figures}): {'; '.join(checks.failures)}"
            )
        return MovedDraws(*ended.draws, checks, ended.mass, density).state(fits[0], tuple(fits[1:]))


def _at_modes(density: ModelDensity, seed: int) -> list[GaussianState]:
    """Return Gaussians about the modes of log p that are found, that with most mass first."""
    before = density.n_gradients
    home = highest_mode(density, np.random.default_rng(seed))
    if home is None:
        raise Unavailable(Reason.HOPELESS, "log p has no mode from which chains could begin")
    search, took = ModeSearch(density, seed, "differences", "differences"), density.n_gradients - before
    found = search.after(home.gaussian, home.log_mass, took, 0, is_sound=True)
    modes = sorted([home, *(() if found is None else found.modes)], key=lambda mode: -mode.log_mass)
    return [mode.gaussian for mode in modes]


def _label(density: ModelDensity, functionals: Functionals | None, i: int) -> str:
    """Name a coordinate, log p, or what else is looked at, by number."""
    if i < density.n_dim:
        return f"`{density.layout.label(i)}`"
    if i == density.n_dim or functionals is None:
        return "log p"
    group, column = functionals.where(i - density.n_dim - 1)
    return group.label(column)


def _values_of(functionals: Functionals, theta: Array) -> Array:
    """Return functionals at draws; NaN where they can't be computed, and are not judged."""
    try:
        return functionals.at(theta)
    except Exception:  # whatever a Deterministic raises at single draws
        return np.full((len(theta), 1), np.nan)


def _n_gradients(found: ManyChains) -> float:
    """Return the gradients that are expected."""
    return float(found.n_chains * _ITERATIONS * _STEPS * found.n_dim**0.25)


def _each(density: ModelDensity) -> float:
    """Return the seconds of a step of a chain."""
    return density.gradient_seconds + _PER_STEP + _PER_COORDINATE * density.n_dim
