"""The Gaussian of the latent variables as what is inside: given hyperparameters, log m and weighted draws."""

import functools
import itertools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import Reason
from pymc_ngvi.core.sizes import AT_ONCE, STREAMED
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, GaussianState, Indices, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.families.sparse import Factors, Precisions
from pymc_ngvi.marginal.pooled import by_neighbours, effective_size_of, picked, smoothed_weights
from pymc_ngvi.marginal.sampler import (
    FLATTENED,
    MOST_VARIANCE,
    N_DRAWS,
    NO_ESTIMATE,
    Hopeless,
    OutsideDraws,
    Pairs,
    Ratios,
    WeightedValues,
    normalised_weights,
    variances_of,
)
from pymc_ngvi.rows.expectation import row_slices
from pymc_ngvi.rows.linear_map import Seen
from pymc_ngvi.rows.many import ManyRows

# --- what is found at values of the hyperparameters, and what the ELBO there lacks of log m ---
#
# The ELBO of the conditional fit is below log m by little: what is missing, log E_q[p / q], is estimated with the same
# draws everywhere. To second order it is half of the variance of log p / q [1]_, which takes over where weights vary
# much.
#
# References
# ----------
# .. [1] M. Opper, U. Paquet and O. Winther (2013). Perturbative corrections for approximate inference in Gaussian
#    latent variable models. JMLR 14. https://jmlr.org/papers/v14/opper13a.html

#: Variance of log weights up to which their mean is estimated well, and from which on it is not.
_TAME = 3.0
_WILD = 2.0 * _TAME
#: Part of the draws that may be outside the support.
_MOST_LOST = 0.1


#: Gaussians of the latent variables at values of the hyperparameters, and draws of them: which values, (n,); ELBOs, in
#: nats of log p there, (n,); the draws, (n, n_inside, n_draws); log p(y, x, theta) - log q'(x | theta), -inf where p is
#: 0, q' being what they are drawn from, a part of them from farther out than q, and log q' - log q, (n, n_draws).
type Drawn = tuple[Indices, Array, Array, Array, Array]


class Marginal(Protocol):
    """Evaluates log m, and draws latent variables given hyperparameters."""

    #: Number of latent variables, those that are integrated out within rows among them, and of the others.
    n_inside: int
    n_dim: int
    #: Conditional fits so far.
    n_fits: int

    def __call__(self, g: Array, /) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        return 0.0

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        return 0.0

    def begin_draws(self, top: Array, scale: Array) -> None:
        """Prepare for draws about the highest value so far, (p,), with units of distances between values, (p,)."""

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> Iterator[Drawn]:
        """Yield draws made of standard normals, (n, n_dim, n_draws), at those values where there is a Gaussian."""


def missing(log_ratio: Array) -> tuple[Array, Array]:
    """Return log E_q[p / q] less the ELBO, (n,) from (n, n_draws), and how far that is from half of the variance."""
    n_found = np.isfinite(log_ratio).sum(axis=1)
    is_lost = n_found < (1.0 - _MOST_LOST) * log_ratio.shape[1]
    variance = np.where(is_lost, np.inf, variances_of(log_ratio))
    is_known, half = variance <= NO_ESTIMATE, 0.5 * np.minimum(variance, NO_ESTIMATE)
    found = np.where(is_known, logsumexp(log_ratio, axis=1) - np.log(np.maximum(n_found, 1)), 0.0)
    by_half = np.clip((variance - _TAME) / (_WILD - _TAME), 0.0, 1.0)  # without a jump
    return np.where(is_known, found + by_half * (half - found), 0.0), np.where(is_known, half - found, np.inf)


# --- Gaussians of the latent variables at many hyperparameters at once ---

#: Steps at most, from a start that is near and from one that is not; their sizes, of which the first that raises the
#: ELBO is taken.
_MOST_STEPS, _MOST_FROM_FAR, _SIZES = 15, 60, (1.0, 0.4, 0.15, 0.05, 0.015)
#: Nats that the last step may gain: of a fit whose log m is wanted, and of one whose draws are weighted, or that no
#: step raises.
SOLVED, LEFT = 1e-3, 0.1


@dataclass(frozen=True, eq=False)
class ManyGaussians(Batch):
    """Gaussians that were fitted."""

    #: Of the hyperparameters that were asked for, those where there is one; shape (n,).
    which: Indices
    #: There.
    rows: ManyRows
    #: shape (n, n_dim).
    mean: Array
    factors: Factors
    #: Nats, of log p at these hyperparameters; shape (n,).
    elbo: Array
    #: What rows saw before the last step.
    seen: Seen
    rules: RowRules

    def draws(self, base: Array) -> Array:
        """Return draws, (n, n_dim, m), of standard normals of that shape."""
        return self.mean[:, :, None] + self.factors.solve(base, transposed=True)

    def log_density(self, base: Array) -> Array:
        """Return the log densities, (n, m), of the draws of standard normals, (n, n_dim, m)."""
        d = base.shape[1]
        return 0.5 * (d - np.einsum("ndm,ndm->nm", base, base)) - self.factors.entropy[:, None]


@dataclass(frozen=True, eq=False)
class _State(Batch):
    """Gaussians, and what is known there."""

    mean: Array
    precision: Array
    covariance: Array
    log_det: Array
    seen: Seen
    elbo: Array
    #: Of the expectation of log p by the mean, and minus its mean Hessian.
    slope: Array
    target: Array
    rules: RowRules


class ManyFitter:
    """Fits Gaussians at many hyperparameters by natural steps that have to raise the ELBO, but for the last one.

    Where a step is to gain little, it is taken as it is, and what it gains is what it would if rows were quadratic: how
    little, is more of a fit that is far below the top.
    """

    def __init__(self, precisions: Precisions, *, is_quadratic: bool) -> None:
        self._precisions, self._is_quadratic = precisions, is_quadratic

    def fit(self, rows: ManyRows, start: Seen, rules: RowRules, left: float, top: float) -> Iterator[ManyGaussians]:
        """Yield the fits, as far as there are any, begun from what rows may see of them."""
        expected = rows.expected(start, rules)
        assert expected.matrix is not None
        with np.errstate(all="ignore"):
            back = (expected.matrix @ (rows.maps.offset - start.mean).ravel()).reshape(len(rows), -1)
            slope = rows.maps.transposed_times(expected.slope + back)
        there, factors = self._factored(expected.precision, np.isfinite(slope).all(axis=1))
        if factors is None:
            return
        mean, here = factors.times_covariance(slope[there]), rows[there]
        if self._is_quadratic:  # the first step leads to the mode, from which the mean of log p falls by d / 2
            elbo = here.values(mean[:, :, None])[:, 0] - 0.5 * mean.shape[1] + factors.entropy
            ok = np.flatnonzero(np.isfinite(elbo))
            yield ManyGaussians(there, here, mean, factors, elbo, start[there], rules[there])[ok]
        else:
            state = self._at(here, mean, expected.precision[there], factors, rules[there])
            yield from self._climb(rows, state, there, left, top, _MOST_STEPS)

    def fit_from_far(self, rows: ManyRows, mean: Array, sd: Array, left: float) -> Iterator[ManyGaussians]:
        """Yield the same begun from independent coordinates, by rules that are chosen on the way."""
        means, sds = (np.broadcast_to(x, (len(rows), len(x))) for x in (mean, sd))
        precision = self._precisions.independent(sds**-2.0)
        there, factors = self._factored(precision, np.isfinite(means).all(axis=1))
        if factors is not None:
            state = self._at(rows[there], means[there], precision[there], factors, None)
            yield from self._climb(rows, state, there, left, -np.inf, _MOST_FROM_FAR, adapt=True)

    def _climb(
        self, rows: ManyRows, state: _State, which: Indices, left: float, top: float, most: int, *, adapt: bool = False
    ) -> Iterator[ManyGaussians]:
        for _ in range(most):
            there, factors = self._factored(
                state.target, np.isfinite(state.slope).all(axis=1) & np.isfinite(state.elbo)
            )
            if factors is None:
                return
            state, which = state[there], which[there]
            move, here = factors.times_covariance(state.slope), rows[which]
            turned = 0.5 * (self._precisions.trace(state.target, state.covariance) - move.shape[1])
            gain = np.maximum(turned + state.log_det - factors.log_det, 0.0)
            gain += 0.5 * np.einsum("nd,nd->n", move, state.slope)
            enough = left * (1.0 + np.maximum(top - state.elbo - gain, 0.0)) ** 2
            has_ended, go = gain < np.maximum(enough, LEFT), np.flatnonzero(np.isfinite(gain) & (gain >= enough))
            new: _State | None = None
            if len(go):
                new, rose = self._stepped(here[go], state[go], factors[go], move[go], adapt=adapt)
                has_ended[go[rose]] = False
            if len(ends := np.flatnonzero(has_ended)):
                yield ManyGaussians(
                    which[ends], here[ends], (state.mean + move)[ends], factors[ends], (state.elbo + gain)[ends],
                    state.seen[ends], state.rules[ends],
                )  # fmt: skip
            if new is None:
                return
            state, which = new, which[go][rose]

    def _factored(self, precision: Array, found: Bools) -> tuple[Indices, Factors | None]:
        """Return which of some precisions have factors, and these."""
        there = np.flatnonzero(found & np.isfinite(precision).all(axis=1))
        if not len(there):
            return there, None
        factors, ok = self._precisions.factored(precision if len(there) == len(precision) else precision[there])
        return there[ok], factors

    def _at(
        self,
        rows: ManyRows,
        mean: Array,
        precision: Array,
        factors: Factors,
        rules: RowRules | None,
        *,
        adapt: bool = False,
    ) -> _State:
        seen = rows.seen(mean, factors.covariance)
        expected = rows.expected(seen, rules, adapt=adapt)
        elbo = expected.value + factors.entropy
        return _State(
            mean, precision, factors.covariance, factors.log_det, seen, np.where(np.isfinite(elbo), elbo, -np.inf),
            rows.maps.transposed_times(expected.slope), expected.precision, expected.rules,
        )  # fmt: skip

    def _stepped(
        self, rows: ManyRows, state: _State, factors: Factors, move: Array, *, adapt: bool
    ) -> tuple[_State | None, Indices]:
        """Take a step from each that raises the ELBO, as large as may be; return where there is one."""
        left, parts = np.arange(len(rows)), list[tuple[Indices, _State]]()
        for size in _SIZES:
            if not len(left):
                break
            some, at = state[left], left
            precision = (1.0 - size) * some.precision + size * some.target
            if size < 1.0:
                there, part = self._factored(precision, np.ones(len(left), dtype=bool))
                if part is None:
                    continue
                some, at, precision = some[there], left[there], precision[there]
                factors, move = part, size * part.times_covariance(some.slope)
            new = self._at(rows[at], some.mean + move, precision, factors, some.rules, adapt=adapt)
            if len(rose := np.flatnonzero(new.elbo > some.elbo)):
                parts.append((at[rose], new[rose]))
                left = np.setdiff1d(left, at[rose])
        if not parts:
            return None, left[:0]
        return _State.joined([part for _, part in parts]), np.concatenate([at for at, _ in parts])


# --- draws of latent variables from farther out, in the directions in which their density falls more slowly than q's
#
# Weights p / q are bounded where q has the heavier tails. Given the hyperparameters, q is a Gaussian: beyond some
# three standard deviations of the linear predictor of a row, p may be many times larger, and what is computed of it,
# a rate or a variance, with it. So a part of the draws has such a predictor moved out, all else following by its
# correlations with it. Weights are those of the mixture of both kinds of draws [1]_, which costs little where q is
# right.
#
# References
# ----------
# .. [1] T. Hesterberg (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics
#    37(2). https://doi.org/10.1080/00401706.1995.10484303

#: One of so many draws is from farther out.
_OF_DRAWS = 8
#: Mean and standard deviation of a predictor that is moved out, in standard deviations; where p and q are compared.
_OUT, _WIDTH, _LOOK = 3.0, 1.5, 4.0
#: Directions at most.
_MOST_PREDICTORS = 128


@dataclass(frozen=True, eq=False)
class Defence:
    """Directions in which draws are moved out, the same for all hyperparameters."""

    #: Of rows: a direction is that in which one of them changes most; shape (n,).
    predictors: Indices
    #: Whether it is moved up or down; shape (n,).
    signs: Array
    #: By which one of them is picked; they add up to 1; shape (n,).
    probabilities: Array

    @classmethod
    def of(cls, given: RowsGiven, at: ManyGaussians) -> "Defence":
        """Return the directions in which log p - log q grows at one fit, by how much it does."""
        if given.is_quadratic:
            return cls(np.empty(0, dtype=np.intp), np.empty(0), np.empty(0))
        used = np.unique(np.concatenate([kind.index.ravel() for kind in at.rows.functions]))
        n = max(1, min(len(used), STREAMED // max(given.n_rows, given.n_dim, 1)))
        used = used[(np.arange(n) * len(used)) // n]
        far = _LOOK * _directions(at, used)
        base = np.concatenate([far, -far, np.zeros((1, given.n_dim, 1))], axis=2)
        with np.errstate(all="ignore"):
            [log_ratio] = at.rows.values(at.draws(base)) - at.log_density(base)
        grows = np.nan_to_num(log_ratio[:-1] - log_ratio[-1], nan=0.0, posinf=0.0, neginf=0.0)
        most = np.argsort(-grows, kind="stable")[:_MOST_PREDICTORS]
        most = most[grows[most] > 1.0]  # of others, weights are bounded as it is, as far as there are draws
        total = grows[most].sum()
        return cls(used[most % n], np.where(most < n, 1.0, -1.0), grows[most] / total if len(most) else np.empty(0))

    def picked(self, n: int, n_draws: int, rng: np.random.Generator) -> Indices:
        """Return in which directions draws are moved out at ``n`` values, (n, n_far)."""
        if not len(self.predictors):
            return np.empty((n, 0), dtype=np.intp)
        return rng.choice(len(self.predictors), (n, n_draws // _OF_DRAWS), p=self.probabilities)

    def moved(self, fits: ManyGaussians, base: Array, picked: Indices) -> tuple[Array, Array]:
        """Return standard normals, (n, n_dim, n_draws), of which the last are moved out, and log q' - log q there.

        q' is the mixture of both kinds of draws; shape (n, n_draws).
        """
        n_far, n_draws = picked.shape[1], base.shape[2]
        if not n_far:
            return base, np.zeros((len(base), n_draws))
        directions = np.swapaxes(_directions(fits, self.predictors), 1, 2)
        along = np.take_along_axis(directions, picked[:, :, None], axis=1)  # (n, n_far, n_dim)
        moved, last = base.copy(), np.swapaxes(base[:, :, -n_far:], 1, 2)
        before = np.einsum("nfd,nfd->nf", last, along)
        after = self.signs[picked] * (_OUT + _WIDTH * before)
        moved[:, :, -n_far:] += np.swapaxes((after - before)[:, :, None] * along, 1, 2)
        part = n_far / n_draws
        # The density of draws that are moved out, as a multiple of the normal density.
        predictors = np.swapaxes(np.matmul(directions, moved), 1, 2)
        squares = predictors**2 - ((self.signs * predictors - _OUT) / _WIDTH) ** 2
        ratio = (np.exp(0.5 * squares) / _WIDTH) @ self.probabilities
        return moved, np.log1p(part * (ratio - 1.0))


def _directions(fits: ManyGaussians, predictors: Indices) -> Array:
    """Return unit vectors of normals along which predictors change most, (n, n_dim, n_predictors); 0 for constants."""
    along = fits.factors.solve(fits.rows.maps.transposed_rows(predictors))
    norm = np.linalg.norm(along, axis=1, keepdims=True)
    return along / np.where(norm > 0.0, norm, np.inf)


# --- weighted pairs of hyperparameters and latent variables: some values of the first, draws of the second at each ---
#
# Each value has a Gaussian of its own; a pair has the weight w = p(y, x, theta) / (g(theta) q(x | theta)). Where these
# are even, the pairs are the posterior up to Monte Carlo error. Where they vary too much given theta, those of theta
# alone are taken, by the ELBO of each Gaussian and what it lacks, and the pairs are those of q.

#: Part of the draws at a value of the hyperparameters above which these are those of a mode.
_MOST_OF_DRAWS = 0.5


@dataclass(frozen=True, eq=False)
class LatentPairs(Pairs):
    """Draws of the latent variables at one value of the hyperparameters; NaN where there is no fit."""

    #: Of log p at these hyperparameters.
    elbo: Array
    #: shape (n_draws, d).
    latents: Array

    def moved(self, by: Array) -> Self:
        """Return those of another density of the hyperparameters."""
        return replace(super().moved(by), elbo=self.elbo + by)


@stored("nested.pairs")
@dataclass(frozen=True, eq=False)
class WeightedPairs(WeightedValues, LatentPairs):
    """Weighted pairs of hyperparameters, in an order in which neighbours are near each other, and latent variables."""

    @classmethod
    def of_modes(cls, parts: "Sequence[WeightedPairs]", own: Sequence[Bools]) -> "WeightedPairs":
        """Return the pairs of several modes: of each those that are its own, (n, m), where most of the draws are."""
        rows = [is_own.mean(axis=1) > _MOST_OF_DRAWS for is_own in own]
        n, kept = sum(of.sum() for of in rows), []
        for part, is_own, of in zip(parts, own, rows, strict=True):
            few, is_own = part[of], is_own[of]
            log_ratio = np.where(is_own, few.log_ratio, -np.inf)
            own_log_ratio = np.where(is_own[:, : part.n_own], few.own_log_ratio, -np.inf)
            log_density = few.log_density + np.log(len(of) / n)
            kept.append(replace(few, log_ratio=log_ratio, own_log_ratio=own_log_ratio, log_density=log_density))
        return cls.joined(kept)

    def lost(self, own: Bools) -> float:
        """Return the part of the weight of hyperparameters at which most draws are not those of the mode."""
        weights = normalised_weights(self.log_estimate - self.log_density)
        return float(weights[own.mean(axis=1) <= _MOST_OF_DRAWS].sum())

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self.log_ratio.size)

    def check(self, n_globals: int, n_local: int) -> None:
        """Raise ValueError where the arrays do not go together."""
        n, m = self.log_ratio.shape
        flat = {a.shape for a in (self.log_density, self.elbo, self.log_estimate)}
        shapes = self.g.shape == (n, n_globals) and self.latents.shape == (n, m, n_local)
        if not (shapes and flat == {(n,)} and len(self.own_log_ratio) == n and self.n_own <= m):
            raise ValueError("the arrays of the nested posterior do not go together")

    # --- weights ---

    @property
    def n_own(self) -> int:
        """Draws of q at each value: the first ones; others are drawn from farther out."""
        return int(self.own_log_ratio.shape[1])

    @property
    def is_joint(self) -> bool:
        """Whether pairs are weighted together."""
        return self.variance <= MOST_VARIANCE

    @property
    def lacking(self) -> float:
        """Nats that ELBOs lack of log m, in the mean."""
        return float(self.weights @ (self.log_marginal - self.elbo))

    @functools.cached_property
    def of_pairs(self) -> Array:
        """Weights of the pairs, (n, m); they add up to 1."""
        if not self.is_joint:
            is_own = np.arange(self.log_ratio.shape[1]) < self.n_own
            return self.weights[:, None] * np.where(is_own, 1.0 / self.n_own, 0.0)
        # A single pair may have much weight in the tail of what grows fast with the latent variables.
        log_ratio = self.log_ratio - self.log_density[:, None]
        return smoothed_weights(log_ratio.ravel())[0].reshape(log_ratio.shape)

    @property
    def effective_size(self) -> float:
        """Of the pairs."""
        return effective_size_of(self.of_pairs)

    # --- draws and moments ---

    def pick(self, uniform: Array) -> tuple[Indices, Indices]:
        """Return the pairs that uniform numbers pick by weight: the hyperparameters, and the draw given these."""
        rows = picked(self.of_pairs.ravel(), uniform)
        first, second = np.divmod(rows, self.log_ratio.shape[1])
        return first, second

    def moments(self) -> tuple[Array, Array]:
        """Return means and standard deviations of the latent variables, (d,) each."""
        weights, latents = self.of_pairs.ravel(), self.latents.reshape(len(self), -1)
        mean, variance = weights @ latents, np.zeros(latents.shape[1])
        for rows in row_slices(len(weights), max(1, AT_ONCE // max(len(mean), 1))):
            variance += weights[rows] @ (latents[rows] - mean) ** 2
        return mean, np.sqrt(variance)


# --- log m(g), the log density of hyperparameters with the latent variables integrated out, and draws of these ---
#
# All values that are asked for at once are evaluated together, as far as that goes; others one after the other.

#: Numbers of rows, of what predictors are found from, or of fronts, in a batch: of dense precisions, fewer, as these
#: take their time anyway, and are to stay in the cache; hyperparameters in a batch at most.
OF_ROWS, _OF_PREDICTORS, _OF_DENSE, MOST_IN_BATCH = 2 * STREAMED, 2 * AT_ONCE, STREAMED // 2, 256
#: Nodes of a row, about.
_NODES = 16
#: Draws behind a correction at most, and values of rows in it: more are taken where its standard error is above `LEFT`.
_MOST_DRAWS, _MOST_VALUES = 512, STREAMED // 2
#: Nats below the top up to which hyperparameters count.
_NEAR = 4.0
#: How often fits are begun from others, those found before among them; standard deviations to begin with where nothing
#: is known.
_TURNS, _FIRST_SCALES = 2, (1.0, 0.1, 0.01)


class EvaluatedMarginal(NamedTuple):
    """log m at one value of the hyperparameters."""

    #: shape (p,).
    g: Array
    #: Nats.
    value: float
    #: What was added to the ELBO.
    correction: float
    #: By how much half of the variance is more than the mean weight says.
    doubt: float
    #: What rows see of the conditional fit.
    seen: Seen
    #: By which these were integrated.
    rules: RowRules


class LatentMarginal:
    """Evaluates log m, each time from the nearest conditional fit."""

    def __init__(self, given: RowsGiven, seed: int, home: GaussianState | None = None) -> None:
        self._given, fronts = given, given.precisions.fronts
        self._fitter = ManyFitter(given.precisions, is_quadratic=given.is_quadratic)
        sizes = OF_ROWS // (_NODES * given.n_rows), _OF_PREDICTORS // given.n_values
        of_fronts = _OF_DENSE if len(fronts.parts.depth) == 1 else _OF_PREDICTORS
        self._size = max(1, min(*sizes, of_fronts // max(fronts.n_fronts, 1), MOST_IN_BATCH))
        self.n_dim, self.n_inside, self.n_fits = given.n_dim, len(given.inside), 0
        self._far = [(given.start, np.full(given.n_dim, scale)) for scale in _FIRST_SCALES]
        if home is not None:
            inside = given.inside[given.kept]
            self._far.insert(0, (home.mean()[inside], home.sd()[inside]))
        most = min(AT_ONCE // max(given.n_dim, 1), _MOST_VALUES // max(given.n_evaluations, 1), _MOST_DRAWS)
        #: Draws that corrections are found from; where weights vary much, twice as many, and so on.
        self._ends = [0, *(n for k in range(most.bit_length()) if (n := N_DRAWS * 2**k) <= max(most, N_DRAWS))]
        rng = np.random.default_rng(seed)
        halves = [rng.standard_normal((given.n_dim, (b - a) // 2)) for a, b in itertools.pairwise(self._ends)]
        self._base = np.concatenate([sign * half for half in halves for sign in (1.0, -1.0)], axis=1)
        self.known: list[EvaluatedMarginal] = []
        self._scale = np.ones(len(given.outside))

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        return np.array([-np.inf if found is None else found.value for found in self.at(g)])

    def at(self, g: Array) -> list[EvaluatedMarginal | None]:
        """Return what is found at values of the hyperparameters, (n, p); None where there is no fit."""
        result: list[EvaluatedMarginal | None] = [None] * len(g)
        for _ in range(_TURNS):
            left = np.array([k for k, found in enumerate(result) if found is None], dtype=np.intp)
            starts = [self.nearest(g[left])] if self.known else self._far
            for which, fits in self.fits(g[left], starts, SOLVED):
                lacks, doubts = self._missing(g[left[which]], fits)
                for i, k in enumerate(left[which].tolist()):
                    value = fits.elbo[i] + lacks[i]
                    result[k] = EvaluatedMarginal(g[k], value, lacks[i], doubts[i], fits.seen[i], fits.rules[i])
            self.known += [found for k in left if (found := result[k]) is not None]
        return result

    @property
    def _top(self) -> int:
        return int(np.argmax([one.value for one in self.known]))

    def nearest(self, g: Array) -> Indices:
        """Return which of the fits that are known are nearest; where all is Gaussian, one is as good as another."""
        if self._given.is_quadratic:
            return np.zeros(len(g), dtype=np.intp)
        apart = (g[:, None] - np.array([one.g for one in self.known])) / self._scale
        return np.einsum("nkp,nkp->nk", apart, apart).argmin(axis=1)

    def fits(
        self, g: Array, starts: Sequence[Indices | tuple[Array, Array]], left: float
    ) -> Iterator[tuple[Indices, ManyGaussians]]:
        """Yield fits at hyperparameters, (n, p), and where they are.

        They begin from known ones, or from means and standard deviations; where that fails, from the next of these.
        """
        top = max((one.value for one in self.known), default=-np.inf)
        for part in row_slices(len(g), self._size):
            rows, agrees = self._given.at(g[part])
            at = np.flatnonzero(agrees)
            self.n_fits += len(at)
            for start in starts:
                if not len(at):
                    break
                if isinstance(start, tuple):
                    found = self._fitter.fit_from_far(rows[at], *start, left)
                else:
                    known = [self.known[k] for k in start[part][at]]
                    seen, rules = Seen.stacked([k.seen for k in known]), RowRules.stacked([k.rules for k in known])
                    found = self._fitter.fit(rows[at], seen, rules, left, top)
                without = np.ones(len(at), dtype=bool)
                for fits in found:
                    without[fits.which] = False
                    yield part.start + at[fits.which], fits
                at = at[without]

    def _missing(self, g: Array, fits: ManyGaussians) -> tuple[Array, Array]:
        """Return what ELBOs lack, and how sure that is; with more draws where their weights vary."""
        lacks, doubts = np.zeros((2, len(g)))
        left, log_ratio = np.arange(0 if self._given.is_quadratic else len(g)), np.empty((len(g), 0))
        for start, end in itertools.pairwise(self._ends):
            new = list[Array]()
            for part in row_slices(len(left), max(1, self._size * N_DRAWS // (end - start))):
                some = fits[left[part]]
                base = np.broadcast_to(self._base[:, start:end], (len(some.elbo), self.n_dim, end - start))
                new.append(self._weighed(g[left[part]], some, base)[1] - some.elbo[:, None])
            if not new:
                break
            log_ratio = np.concatenate([log_ratio, np.concatenate(new)], axis=1)
            lacks[left], doubts[left] = missing(log_ratio)
            variance = variances_of(log_ratio)
            is_rough = (variance < NO_ESTIMATE) & (np.expm1(np.minimum(variance, NO_ESTIMATE)) > end * LEFT**2)
            left, log_ratio = left[is_rough], log_ratio[is_rough]
        return lacks, doubts

    def _weighed(self, g: Array, fits: ManyGaussians, base: Array) -> tuple[Array, Array]:
        """Return draws of fits, (n, n_dim, m), and log p - log q there, (n, m); -inf where that is no number."""
        x = fits.draws(base)
        with np.errstate(all="ignore"):
            log_ratio = self._given.logp(fits.rows, g, x) - fits.log_density(base)
        return x, np.where(np.isfinite(log_ratio), log_ratio, -np.inf)

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        top = self.known[self._top]
        return 2.0 * (top.correction + top.doubt)  # half of it is what the ELBO lacks, to second order

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        values, doubts = np.array([(one.value, one.doubt) for one in self.known]).T
        return float(np.std(doubts[values > values.max() - _NEAR]))

    def begin_draws(self, top: Array, scale: Array) -> None:
        """Find in which directions draws come from farther out; see `Marginal`."""
        self._scale, highest = scale, np.array([self._top])
        [(_, fit)] = self.fits(self.known[self._top].g[None], [highest], LEFT)
        self._defence = Defence.of(self._given, fit)

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> Iterator[Drawn]:
        """Yield draws, the last of them moved out; see `Marginal`."""
        picked = self._defence.picked(len(g), base.shape[2], rng)
        for which, fits in self.fits(g, [self.nearest(g), np.full(len(g), self._top)], LEFT):
            normals, log_mixed = base[which], np.zeros((len(which), base.shape[2]))
            if self._given.is_quadratic:
                latents, log_ratio = fits.draws(normals), np.repeat(fits.elbo[:, None], base.shape[2], axis=1)
            else:
                normals, log_mixed = self._defence.moved(fits, normals, picked[which])
                latents, log_ratio = self._weighed(g[which], fits, normals)
            latents = fits.rows.drawn_inside(latents, rng)
            yield which, fits.elbo, latents, log_ratio - log_mixed, log_mixed


# --- what is inside ---

#: Nats that an ELBO may lack, as far as that can be told by few draws: half of the variance.
_MOST_LACKING = 0.5 * _WILD


class Exploration(NamedTuple):
    """What is known of the hyperparameters, and of the latent variables given these."""

    pairs: WeightedPairs
    #: Part of the predicted weight that is where there is no fit.
    lost: float
    #: By how much values from farther out move a mean, in its standard errors; 0 where it is by little.
    moved: float


class LatentInside:
    """Latent variables given hyperparameters, which are divided by the scales that others are the logarithms of."""

    def __init__(
        self,
        marginal: Marginal,
        start: Array,
        ratios: Sequence[tuple[int, int]],
        most_variance: float = np.inf,
        n_values: float = 0.0,
        n_before: int = 0,
    ) -> None:
        self._marginal, self._most_variance = marginal, most_variance
        #: Values with draws that are expected, and fits that came before.
        self._n_values, self._n_before = n_values, n_before
        self.bend = Ratios.about(ratios, start)
        self._known, self._is_ready = list[tuple[Array, Array]](), False

    def log_m(self, y: Array) -> Array:
        """Return log m, as a density of what is divided."""
        g = self.bend.inverse(y)
        self._known.append((g, self._marginal(g)))
        return self._known[-1][1] - self.bend.log_slope(g)

    def pairs(self, y: Array, n_draws: int, rng: np.random.Generator) -> LatentPairs:
        """Return draws of the latent variables."""
        if not self._is_ready:
            self._begin()
        g, n, d, n_own = self.bend.inverse(y), len(y), self._marginal.n_inside, n_draws - n_draws // _OF_DRAWS
        half = rng.standard_normal((n, self._marginal.n_dim, (n_draws + 1) // 2))
        base = np.concatenate([half, -half], axis=2)[:, :, :n_draws]
        log_ratio, own = np.full((n, n_draws), -np.inf), np.full((n, n_own), -np.inf)
        elbo, estimate = np.full((2, n), -np.inf)
        latents = np.zeros((n, n_draws, d))
        for at, bound, x, log_weight, log_mixed in self._marginal.drawn(g, base, rng):
            log_ratio[at], elbo[at] = log_weight, bound
            own[at] = (log_weight + log_mixed)[:, :n_own]
            estimate[at] = bound + np.minimum(missing(own[at] - bound[:, None])[0], _MOST_LACKING)
            latents[at] = np.swapaxes(x, 1, 2)
        return LatentPairs(log_ratio, own, estimate, elbo, latents).moved(-self.bend.log_slope(g))

    def _begin(self) -> None:
        """See whether draws are worth it, and prepare what they begin from."""
        if (variance := self._marginal.variance()) > self._most_variance:
            raise Hopeless(
                Reason.NOT_PASSED,
                "given the hyperparameters, latent variables are too far from a Gaussian (variance "
                f"{variance:.1f} of log weights at the mode)",
            )
        prices.expect(self._n_values / (self._n_before + self._marginal.n_fits))
        points, values = (np.concatenate(parts) for parts in zip(*self._known, strict=True))
        weights, self._is_ready = normalised_weights(FLATTENED * values), True
        scale = np.sqrt(weights @ (points - weights @ points) ** 2)
        self._marginal.begin_draws(points[np.argmax(values)], scale)

    def weighted(self, draws: OutsideDraws) -> WeightedPairs:
        """Return what was drawn as weighted pairs of hyperparameters and latent variables."""
        pairs, spread = draws.pairs, normalised_weights(draws.log_marginal - draws.log_density)
        assert isinstance(pairs, LatentPairs)
        sd = np.sqrt(spread @ (draws.g - spread @ draws.g) ** 2)
        order = by_neighbours(draws.g / sd)
        g = self.bend.inverse(draws.g[order])
        log_slope = self.bend.log_slope(g)
        moved = vars(pairs[order].moved(log_slope))
        return WeightedPairs(**moved, g=g, log_density=draws.log_density[order] + log_slope)
