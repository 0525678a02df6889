"""Proposals of many hyperparameters, learned round by round from the weights of the rounds before [1]_.

An emulator of log m takes values in proportion to the square of the number of hyperparameters, and time in proportion
to the sixth power. Margins and correlations take a few draws for each.

References
----------
.. [1] O. Cappe, A. Guillin, J.-M. Marin, C. P. Robert (2004). Population Monte Carlo. Journal of Computational and
   Graphical Statistics 13(4). https://doi.org/10.1198/106186004X12803
"""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Hopeless
from pymc_ngvi.marginal.proposals import effective_size, tempered
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.marginal.sampling import Pool, evenly_picked
from pymc_ngvi.marginal.tails import Bend
from pymc_ngvi.nested.found import Marginal
from pymc_ngvi.nested.margins import Margins
from pymc_ngvi.nested.mode import LatentMode
from pymc_ngvi.nested.pairs import WeightedPairs, normalised_weights
from pymc_ngvi.nested.rounds import Guess, Rounds

# --- many hyperparameters: draws on their way from a wide density to the posterior, of which a proposal is learned ---
# In dozens of dimensions draws of a first guess say next to nothing of where the posterior is. Sequential Monte Carlo
# [1]_ goes there by intermediate densities: at each, draws are weighted, repeated by weight, and moved by steps that
# leave it as it is. Steps are those of an autoregression of order one in the normals of a map that is fitted on the
#    way;
# a density near to that of the map accepts them in any dimension [2]_. They take no gradient.
#
# What comes of it is a proposal, not the posterior: that is left to weights.
#
# References
# ----------
# .. [1] P. Del Moral, A. Doucet, A. Jasra (2006). Sequential Monte Carlo samplers. Journal of the Royal Statistical
#    Society: Series B 68(3). https://doi.org/10.1111/j.1467-9868.2006.00553.x
# .. [2] S. L. Cotter, G. O. Roberts, A. M. Stuart, D. White (2013). MCMC methods for functions: modifying old
#    algorithms
#    to make them faster. Statistical Science 28(3). https://doi.org/10.1214/13-STS421

#: Draws, and by how much wider than the curvature at a mode they begin.
_N_DRAWS, _WIDER_START = 400, 2.0
#: Part of the draws that weights of one step leave effective; steps at most.
_LEFT, _MOST = 0.5, 40
#: Sizes of moves, in turn, as parts of the one that is adapted; acceptance that it is adapted to.
_SIZES, _ACCEPTED = (1.0, 0.35), 0.3
#: Moves at the posterior after which a map is fitted, and of how many of the last ones' draws.
_AFTER, _KEPT = 6, 8
#: Smallest and largest size; halvings that find a step.
_LIMITS, _HALVINGS = (0.02, 1.0), 40

type Function = Callable[[Array], Array]


class Annealing:
    """Draws on their way."""

    def __init__(self, function: Function, mode: LatentMode, rng: np.random.Generator) -> None:
        self._function, self._rng = function, rng
        self._begin = self._map = Margins.of_gaussian(mode.at, _WIDER_START**2 * mode.cov)
        self._g = self._begin.draws(_N_DRAWS, rng)
        self._value, self._first = self._values(self._g), self._begin.log_density(self._g)
        self._at, self._size = 0.0, 1.0
        self._seen: list[Array] = []

    def go(self) -> None:
        """Go to the posterior."""
        for _ in range(_MOST):
            self._step()
            self._move()
            if self._at == 1.0:
                return
        said = f"a way of {_MOST} steps to the posterior of {self._g.shape[1]} hyperparameters does not end there"
        raise Hopeless(Reason.HOPELESS, said)

    def learned(self) -> Margins:
        """Move at the posterior, and return what is fitted to the draws seen there."""
        for _ in range(_AFTER):
            self._move()
            self._seen.append(self._g.copy())
        some = np.concatenate(self._seen[-_KEPT:])
        self._map = Margins.fitted(some, np.full(len(some), 1.0 / len(some)))
        return self._map

    def _values(self, g: Array) -> Array:
        values = self._function(g)
        return np.where(np.isfinite(values), values, -np.inf)

    def _step(self) -> None:
        """Go on to a density at which weights leave a part of the draws effective, fit the map, and draw by weight."""
        ratio, n = self._value - self._first, len(self._g)
        if not np.isfinite(ratio).any():
            raise Hopeless(Reason.HOPELESS, "log m is not finite at draws about its mode")
        low, high = 0.0, 1.0 - self._at
        if effective_size(high * ratio) < _LEFT * n:
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if effective_size(middle * ratio) > _LEFT * n else (low, middle)
        self._at = 1.0 if high == 1.0 - self._at else self._at + high
        weights = np.exp(high * ratio - logsumexp(high * ratio))
        self._map = Margins.fitted(self._g, weights)
        rows = evenly_picked(weights, n, float(self._rng.random()))
        self._g, self._value, self._first = self._g[rows], self._value[rows], self._first[rows]

    def _move(self) -> None:
        """Move all draws, far and near."""
        log_target = self._log_target(self._g, self._value, self._first)
        z = self._map.forward(self._g)
        for part in _SIZES:
            size = part * self._size
            to = np.sqrt(1.0 - size**2) * z + size * self._rng.standard_normal(z.shape)
            g = self._map.inverse(to)
            value, first = self._values(g), self._begin.log_density(g)
            new = self._log_target(g, value, first)
            accepted = np.log(self._rng.random(len(g))) < new - log_target
            z[accepted], log_target[accepted] = to[accepted], new[accepted]
            self._g[accepted], self._value[accepted] = g[accepted], value[accepted]
            self._first[accepted] = first[accepted]
            if part == 1.0:
                self._size = float(np.clip(self._size * np.exp(accepted.mean() - _ACCEPTED), *_LIMITS))

    def _log_target(self, g: Array, value: Array, first: Array) -> Array:
        """Return the log density of where draws are, over that of the normals of the map."""
        z = self._map.forward(g)
        log_map = self._map.log_slope(g) - 0.5 * (z**2).sum(axis=1)
        with np.errstate(invalid="ignore"):
            result: Array = (1.0 - self._at) * first + self._at * value - log_map
        return np.where(np.isfinite(result), result, -np.inf)


# --- proposals of many hyperparameters, learned round by round from the weights of the rounds before [1]_ ---

#: By how much the first proposal is wider than the curvature at the mode.
_FIRST = 1.15
#: Part of a proposal that is wider, by how much, and by how much its tails are heavier.
_OF_WIDER, _WIDER, _HEAVIER = 0.15, 1.3, 0.9
#: Draws of which values are picked by weight, for each of these and at least.
_POOL, _LEAST_POOL = 8, 8_000
#: Normals are cut off there in a polynomial; nats below the others from which on values are left out of it.
_BULK, _DEEP = 3.5, 12.0
#: Values for each of its terms, at least; its ridge; part of the variance that it may leave.
_PER_TERM, _RIDGE, _BETTER = 3.0, 2.0, 0.9
#: Values that it is fitted to at most, the last ones.
_MOST_KNOWN = 8_000
#: Values of the first round, in a part of all and for each hyperparameter at least; how many times those of one round
#: there may be in the next one; rounds at most.
_LEARNING, _LEARNING_PER_DIM, _GROWS, _MOST_ROUNDS = 0.35, 15, 2, 8
#: Effective values, for each hyperparameter, that a proposal is learned from; fewer say that the posterior is far off.
_PER_DIM, _FAR_OFF = 3.0, 3.0
#: Effective part of a round from which on no draws are annealed, and that counts at least; effective size that all
#: rounds are to have, and by how many times more values than usual.
_GOOD, _LEAST_PART, _WANTED, _MOST_MORE = 0.15, 0.02, 460.0, 6.0


class Learned:
    """A proposal: margins, times a polynomial's exponential, and a part that is wider."""

    def __init__(self, margins: Margins, points: Array, values: Array) -> None:
        self._margins, self._wider = margins, margins.widened(_WIDER, _HEAVIER)
        self._slopes = _slopes(margins, points, values)

    def log_density(self, g: Array) -> Array:
        """Return the log density but for a constant, (n,), from (n, p)."""
        own = self._margins.log_density(g)
        if self._slopes is not None:
            own += _terms(self._margins.forward(g)) @ self._slopes
        return np.logaddexp(np.log(1.0 - _OF_WIDER) + own, np.log(_OF_WIDER) + self._wider.log_density(g))

    def guess(self, n: int, rng: np.random.Generator) -> Guess:
        """Return it as a predicted density, from which ``n`` values can be drawn."""
        count = max(_POOL * n, _LEAST_POOL)
        n_wider = int(_OF_WIDER * count)
        g = np.concatenate([self._margins.draws(count - n_wider, rng), self._wider.draws(n_wider, rng)])
        drawn = np.logaddexp(
            np.log(1.0 - _OF_WIDER) + self._margins.log_density(g), np.log(_OF_WIDER) + self._wider.log_density(g)
        )
        p = g.shape[1]
        pool = Pool(g, drawn, drawn, np.arange(count) % 2, np.zeros(count, dtype=bool))
        return Guess(self.log_density, Whitening(self._margins.forward, np.zeros(p), np.eye(p)), pool)


def _terms(z: Array) -> Array:
    """Return powers and products of normals, of the bulk: beyond, the margins alone say what there is."""
    u = np.clip(z, -_BULK, _BULK)
    i, j = np.tril_indices(u.shape[1], -1)
    return np.concatenate([u, u**2, u**3, u**4, u[:, i] * u[:, j]], axis=1)


def _slopes(margins: Margins, points: Array, values: Array) -> Array | None:
    """Return the coefficients of terms; None where there are too few values, or they predict nothing."""
    if not len(values):
        return None
    left = values - margins.log_density(points)
    near = left > np.median(left[np.argsort(values)[-len(values) // 2 :]]) - _DEEP
    terms, left = _terms(margins.forward(points[near])), left[near]
    n, k = terms.shape
    if n < _PER_TERM * k:
        return None
    first = np.random.default_rng(n).permutation(n) < n // 2
    means, found = terms[first].mean(axis=0), _ridge(terms[first], left[first])
    if np.var(left[~first] - (terms[~first] - means) @ found) > _BETTER * np.var(left[~first]):
        return None
    return _ridge(terms, left)


def _ridge(terms: Array, values: Array) -> Array:
    """Return the coefficients of a regression that shrinks."""
    apart = terms - terms.mean(axis=0)
    scale = np.maximum(apart.std(axis=0), 1e-12)
    apart /= scale
    gram = apart.T @ apart + _RIDGE * np.eye(apart.shape[1])
    return np.linalg.solve(gram, apart.T @ (values - values.mean())) / scale


class RememberedMarginal:
    """Evaluates log m, and remembers the values."""

    def __init__(self, marginal: Marginal, n_dim: int) -> None:
        self._marginal = marginal
        self._points, self._values = list[Array](), list[Array]()
        self.of_rounds = np.empty((0, n_dim)), np.empty(0)

    def __call__(self, g: Array) -> Array:
        """Return log m, (n,), from (n, p)."""
        values = self._marginal(g)
        self._points.append(np.array(g))
        self._values.append(values)
        return values

    def forget(self) -> None:
        """Leave out what has been evaluated so far: it was on the way."""
        self._points, self._values = [], []

    @property
    def all(self) -> tuple[Array, Array]:
        """The last points and values."""
        points = np.concatenate([*self._points, self.of_rounds[0]])[-_MOST_KNOWN:]
        values = np.concatenate([*self._values, self.of_rounds[1]])[-_MOST_KNOWN:]
        return points[np.isfinite(values)], values[np.isfinite(values)]


def learn(
    marginal: Marginal, mode: LatentMode, n_values: int, seed: int, *, anneals: bool
) -> tuple[WeightedPairs, Array, float]:
    """Return rounds of hyperparameters, pooled; see `Rounds.pooled`.

    Notes
    -----
    The first proposal is a Student t about the mode. Where too few of its draws are effective to learn from, draws that
    are annealed show the way.
    """
    p = len(mode.at)
    rng, n = np.random.default_rng([seed, p]), max(int(_LEARNING * n_values), _LEARNING_PER_DIM * p)
    first = Margins.of_gaussian(mode.at, _FIRST**2 * mode.cov)
    rounds, margins, known, way = Rounds(marginal, n_values, seed), first, RememberedMarginal(marginal, p), None
    total = 0
    for _ in range(_MOST_ROUNDS):
        rounds.add(Learned(margins, *known.all).guess(n, rng), Bend(), n / n_values)
        pooled, total = rounds.pooled(), total + n
        pairs = pooled[0]
        log_weights, part = pairs.log_marginal - pairs.log_density, rounds.efficiency()
        size, known.of_rounds = effective_size(log_weights), (pairs.g, pairs.log_marginal)
        if size >= _WANTED or total >= _MOST_MORE * n_values:
            break
        if anneals and part < _GOOD and (way is not None or size < _FAR_OFF * p):
            if way is None:
                way = Annealing(known, mode, rng)
                way.go()
                known.forget()
            margins = way.learned()
        elif way is None:
            log_weights = tempered(log_weights, _PER_DIM * p)
            margins = Margins.fitted(pairs.g, normalised_weights(log_weights), first)
        missing = (_WANTED - size) / max(part, _LEAST_PART)
        n = int(np.clip(missing, n, min(_GROWS * n, _MOST_MORE * n_values - total + n)))
    return pooled
