"""Kinds of posteriors that are no Gaussian, by the value of the option ``posterior`` that asks for one."""

import functools
import logging
import math

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pymc_ngvi.core.climbs import ascend
from pymc_ngvi.core.messages import Failed, Reason, Unavailable
from pymc_ngvi.core.prices import UsedUp, Work
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer, Functionals, functionals_of
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.fitting.modes import Mode, ModeSearch, abouts, climbed, is_flat
from pymc_ngvi.fitting.record import spared
from pymc_ngvi.marginal.exact import exact_posterior, forest_of, n_values, nodes_of_value, seconds_of_node
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.quadrature import MOST_PLAIN, Forest, references
from pymc_ngvi.marginal.sampler import MOST_VARIANCE
from pymc_ngvi.moves.posterior import N_STARTS, MovedDraws, moved_until_arrived
from pymc_ngvi.nested.posterior import LEAST, latent_rows_of, nested_posterior, nested_seconds
from pymc_ngvi.posteriors.plan import Candidate

# --- what the plan asks of a kind of posterior ---


class PosteriorStart(NamedTuple):
    """What a posterior begins from: a fit of all coordinates if there is one, others at other modes.

    By rows: whether values of log p are those of its rows. Of other data: whether the fit is one to these.
    """

    density: ModelDensity
    q: GaussianState | None
    seed: int
    others: list[GaussianState]
    by_rows: bool
    of_other_data: bool = False


class PosteriorKind[Found](ABC):
    """A kind of posterior: whether a model has it, what it takes and is worth, and how it is made.

    ``Found`` is what it goes by: trees, rows given hyperparameters. A kind is a subclass, and a row of `KINDS`.
    """

    #: The value of the option ``posterior`` that asks for it, which is what it is called.
    name: ClassVar[str]
    #: Seconds of any, at least: where another one takes fewer, it is not looked for.
    least: ClassVar[float] = 0.0
    #: Whether it may be made without a Gaussian fit before it.
    may_come_first: ClassVar[bool] = False
    #: Whether it is tried, without being asked for, only where nothing else can be relied on.
    is_last: ClassVar[bool] = False
    #: Part of its price after which it is known not to be exact.
    of_failure: ClassVar[float] = 1.0

    @property
    def title(self) -> str:
        """What is announced before it."""
        return f"{self.name.capitalize()} posterior"

    @abstractmethod
    def possible(self, density: ModelDensity) -> Found:
        """Return what it goes by; raise `Unavailable` with the reason where a model has none."""

    @abstractmethod
    def chance(self, found: Found) -> float:
        """Return the chance that it turns out to be exact."""

    @abstractmethod
    def seconds(self, found: Found, density: ModelDensity, *, by_rows: bool) -> float:
        """Return the estimated seconds that it takes."""

    def price(self, found: Found, density: ModelDensity, *, by_rows: bool) -> Candidate:
        """Return it as a candidate, with its seconds."""
        seconds = self.seconds(found, density, by_rows=by_rows)
        return Candidate(self.name, seconds=seconds, chance=self.chance(found), of_failure=self.of_failure)

    @abstractmethod
    def run(self, start: PosteriorStart, found: Found, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior; raise `Unavailable`: `UsedUp` if it takes too long, `Failed` if it is no use.

        ``work`` counts what it takes; ``is_only``: there is no other one to try after it.
        """

    def is_plain(self, found: Found) -> bool:
        """Tell whether nothing is integrated: then a Gaussian is seldom far off."""
        return False

    def comes_first(self, found: Found, *, by_rows: bool) -> bool:
        """Tell whether it is worth to be tried before any Gaussian fit, without being asked for."""
        return False


def if_available[Found](find: Callable[[ModelDensity], Found], density: ModelDensity) -> Found | None:
    """Return what a model is found to have for a kind of posterior; None where that is Unavailable."""
    try:
        with spared("Looking for a posterior", "It is left out.", logging.DEBUG):
            return find(density)
    except Unavailable:
        return None


# --- exact posteriors: trees of local coordinates are integrated by quadrature, the globals sampled ---

#: The chance that it is exact where that is not known: of trees, with more globals than plain models have.
_UNSURE = 1.0 / 3.0
#: Seconds that proposals and moments take in trees, beside values.
_BESIDE_TREES = 0.1


class TreeKind(PosteriorKind[Forest]):
    """Globals sampled, trees integrated by quadrature; of few parameters without trees, all are sampled."""

    name = "exact"

    def possible(self, density: ModelDensity) -> Forest:
        """Return globals and trees."""
        return forest_of(density)

    def chance(self, found: Forest) -> float:
        """Return 1, but with many globals beside trees, which are not always sampled well."""
        return _UNSURE if found.n_local and found.n_globals > MOST_PLAIN else 1.0

    def seconds(self, found: Forest, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what it takes."""
        n_nodes = nodes_of_value(references(found.n_levels)[1]) if found.n_local else 1.0
        each = seconds_of_node(found, density, by_rows=by_rows) * n_nodes
        return _BESIDE_TREES * bool(found.n_local) + each * n_values(found, each)

    def run(self, start: PosteriorStart, found: Forest, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior: only an exact one is worth anything."""
        assert start.q is not None
        try:
            state = exact_posterior(
                start.density, start.q, found, start.seed, work.expect, start.others, of_other_data=start.of_other_data
            )
        except UsedUp:
            raise
        except Unavailable as reason:
            raise Failed(reason.code, reason.sentence, reason.on_request) from None
        if not state.checks.tells_limits:
            is_plain = not found.n_local and found.n_globals <= MOST_PLAIN
            raise Failed(Reason.ELSEWHERE if is_plain else Reason.NOT_PASSED, "; ".join(state.checks.failures))
        return state

    def is_plain(self, found: Forest) -> bool:
        """Tell whether there are no trees."""
        return not found.n_local


# --- nested posteriors: hyperparameters sampled, latent variables from Gaussian fits given these, pairs weighted ---

#: The chance that it turns out to be exact where latent variables are far from Gaussian given hyperparameters.
_UNEVEN = 1.0 / 100.0
#: Latent variables for each hyperparameter, and hyperparameters of quadratic rows, from which on it comes first.
_MANY, _MANY_SCALES = 3, 7


class LatentGaussianKind(PosteriorKind[RowsGiven]):
    """Hyperparameters sampled, latent variables drawn from Gaussians given these, both weighted together."""

    name = "nested"
    least = LEAST
    may_come_first = True
    of_failure = 0.15  # whether latent variables are nearly Gaussian is known early

    def possible(self, density: ModelDensity) -> RowsGiven:
        """Return rows given hyperparameters."""
        return latent_rows_of(density)

    def chance(self, found: RowsGiven) -> float:
        """Return 1 where rows are quadratic: then weights of pairs are even."""
        if found.is_quadratic:
            return 1.0
        return _UNEVEN if found.is_uneven else _UNSURE

    def seconds(self, found: RowsGiven, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what it takes."""
        return nested_seconds(found)

    def run(self, start: PosteriorStart, found: RowsGiven, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior."""
        with work.counting():
            most_variance = math.inf if is_only else MOST_VARIANCE
            return nested_posterior(
                start.density, start.q, start.seed, most_variance, start.others, of_other_data=start.of_other_data
            )

    def comes_first(self, found: RowsGiven, *, by_rows: bool) -> bool:
        """Tell whether there are many latent variables, or scales, and, by rows, whether the first have one mode.

        Other modes are looked for from a Gaussian fit; of rows that are concave given the hyperparameters, there are
        none of the latent variables.
        """
        n_outside = len(found.outside)
        # A Gaussian of all is far off where there are many scales, and takes longer than what is exact given these.
        is_many = found.n_dim >= _MANY * n_outside or (found.is_quadratic and n_outside > _MANY_SCALES)
        return is_many and (not by_rows or found.is_concave)


# --- the highest mode that log p is found to have from points about the start, with the Gaussian about it ---
# It is found by gradients alone, without a fit: log p is climbed from several points at once, and then from the end of
# the best climb by Newton's method, with curvatures from differences of gradients.

#: How far from the start the points are from which log p is climbed, at most, in each coordinate.
_APART = 1.0


def highest_mode(density: ModelDensity, rng: np.random.Generator) -> Mode | None:
    """Return a mode with the Gaussian of Laplace's method; None where log p rises without end, or is flat."""
    start = density.initial_point()
    apart = rng.uniform(-_APART, _APART, (N_STARTS, len(start))) * np.linspace(0.0, 1.0, N_STARTS)[:, None]
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
#
# The Gaussian is a fit, or, where none comes before, that of Laplace's method at the highest mode that is found: chains
# need to know no more than about where they are, and how wide.

#: Chains where few points are evaluated at once, half as many as elsewhere; points from which on they are many.
_FEW_CHAINS, _AT_ONCE = 64, 16
#: Gradients of a chain that are expected, over the fourth root of the dimension: 75 trajectories of 2.5 steps.
_GRADIENTS = 187.5
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
    """Draws of the fit, moved until they have arrived: for models that have no other exact posterior."""

    name = "moved"
    may_come_first = True
    is_last = True

    def possible(self, density: ModelDensity) -> ManyChains:
        """Return how many chains: fewer where few points are evaluated at once."""
        if density.why_in_part:
            raise Unavailable(Reason.IN_PART, density.why_in_part)
        if density.is_sharded:
            raise Unavailable(Reason.IN_PART, "its data are in shards, and each step would need all of them")
        is_few = isinstance(density, LogDensity) and density.batch_size < _AT_ONCE
        return ManyChains((1 if is_few else 2) * _FEW_CHAINS, density.n_dim)

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
                Reason.NOT_PASSED, f"the chains have not converged ({checks.figures}): {'; '.join(checks.failures)}"
            )
        return MovedDraws(*ended.draws, checks, fits[0], tuple(fits[1:]), ended.mass, density)


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
    return float(found.n_chains * _GRADIENTS * found.n_dim**0.25)


def _each(density: ModelDensity) -> float:
    """Return the seconds of a step of a chain."""
    return density.gradient_seconds + _PER_STEP + _PER_COORDINATE * density.n_dim


# --- the registry ---

#: In the order in which they are looked for: those that can be had without much looking first, the last resort last.
KINDS: dict[str, PosteriorKind[Any]] = {kind.name: kind for kind in (TreeKind(), LatentGaussianKind(), MovedKind())}
