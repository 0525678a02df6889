"""Hyperparameters sampled: log m is evaluated at few values and predicted elsewhere; weights correct predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scipy.special import ndtri
from scipy.stats import qmc

from pymc_ngvi.core import prices
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Hopeless, Sampler
from pymc_ngvi.marginal.proposals import Proposal, effective_size
from pymc_ngvi.marginal.ridges import ridges
from pymc_ngvi.marginal.sampling import Pool, Sampled
from pymc_ngvi.nested.emulator import Emulated
from pymc_ngvi.nested.found import Marginal
from pymc_ngvi.nested.learning import learn
from pymc_ngvi.nested.mode import LatentMode, find_mode
from pymc_ngvi.nested.pairs import WeightedPairs, normalised_weights
from pymc_ngvi.nested.rounds import Guess, Rounds
from pymc_ngvi.nested.seconds import MOST_EMULATED
from pymc_ngvi.nested.verdict import MOST_MOVED

#: Fits of all rounds, in those of the values that are wanted.
_OF_ROUNDS = 1.5
#: Evaluations of log m before there are weights, after those on the way to the mode, and for each hyperparameter.
_MOST, _MOST_OF_EACH = 15, 15
#: Points about the mode at which log m is evaluated first; for each hyperparameter; for each term of a parabola, where
#: values have no errors that many of them would smooth; how far out they are, in turn, in the standard deviations of
#: normals.
_OF_DESIGN, _OF_DESIGN_OF_EACH, _PER_TERM, _SIZES_OF_DESIGN = 10, 12, 2, (1.0, 2.0, 3.0)
#: Part of the pool that is drawn about ridges.
_OF_RIDGES = 0.2
#: Effective size of the pool: predictions cost nothing.
_WANTED = 4_000
#: Parts of all values that are in each round: what the first has found makes predictions better, and the last is drawn
#: only where less than a part of the values is effective, or k-hat is high.
_PARTS, _GOOD, _HEAVY = (0.35, 0.65, 0.5), 0.5, 0.5
#: Predicted weight of a draw from which on log m is evaluated there, of how many at once, and of how many at most.
_HEAVIEST, _HEAVY_AT_ONCE, _MOST_HEAVY = 0.005, 8, 40
#: Values that predictions are told of after a round, at most.
_MOST_TOLD = 150
#: Standard deviations by which a wider round may move a mean in any case.
_SMALL = 0.05


class Uneven(Hopeless):
    """Weights of draws of the latent variables vary too much."""


@dataclass(frozen=True, eq=False)
class Exploration:
    """What is known of the hyperparameters, and of the latent variables given these."""

    pairs: WeightedPairs
    #: Part of the predicted weight that is where there is no fit.
    lost: float
    #: By how much values from farther out move a mean, in its standard errors; 0 where it is by little.
    moved: float


def explore(
    marginal: Marginal,
    start: Array,
    scale: Array,
    n_values: int,
    seed: int,
    most_variance: float = np.inf,
    ratios: Sequence[tuple[int, int]] = (),
    *,
    n_before: int = 0,
    anneals: bool = False,
) -> Exploration:
    """Sample the hyperparameters, and the latent variables given these; so many fits have come before."""
    p = len(start)
    marginal.scale = scale
    mode = find_mode(marginal, start, scale)
    if mode is None:
        raise Hopeless(Reason.HOPELESS, "the latent variables can't be fitted where the hyperparameters start")
    if (variance := marginal.variance()) > most_variance:
        raise Uneven(
            Reason.NOT_PASSED,
            f"given the hyperparameters, latent variables are too far from a Gaussian (variance {variance:.1f} of log "
            "weights at the mode)",
        )
    prices.expect(_OF_ROUNDS * n_values / (n_before + marginal.n_fits))
    marginal.scale = np.sqrt(np.diag(mode.cov))
    if p > MOST_EMULATED:
        marginal.records = False
        pairs, log_near, lost = learn(marginal, mode, n_values, seed, anneals=anneals)
        return Exploration(pairs, lost, _moved(pairs, log_near))
    n_terms = (p + 1) * (p + 2) // 2
    marginal(_around(mode, _OF_DESIGN + (_PER_TERM * n_terms if marginal.is_exact else _OF_DESIGN_OF_EACH * p)))
    emulated = Emulated(marginal, len(marginal.known) + _MOST + _MOST_OF_EACH * p)
    for known in marginal.known:
        emulated.tell(known.g, known.value)
    sampler = Sampler(emulated, mode.at, mode.cov, seed, wanted=_WANTED, ratios=ratios)
    sampled = sampler.run()
    ridge = _ridge(emulated, sampled)
    if ridge is not None:
        proposal = sampled.proposal.beside(ridge, _OF_RIDGES)
        sampled.pool = sampler.sequences.enlarged(sampler.sequences.first(proposal), proposal, _WANTED)
    rounds = Rounds(marginal, n_values, seed, ridge)
    for number, part in enumerate(_PARTS):
        rounds.add(_guess(emulated, sampled.pool), sampled.bend, part)
        pairs, log_near, lost = rounds.pooled()
        moved = _moved(pairs, log_near)
        is_even = effective_size(pairs.log_marginal - pairs.log_density) > _GOOD * len(pairs.g)
        if number == len(_PARTS) - 1 or (number and is_even and pairs.khat < _HEAVY and moved < MOST_MOVED):
            break
        _tell(emulated, pairs)
        sampled.pool = sampler.sequences.again(sampled.pool)
    return Exploration(pairs, lost, moved)


def _around(mode: LatentMode, n: int) -> Array:
    """Return points that fill the space about a mode, near it and farther out, (n, p)."""
    uniform = qmc.Halton(len(mode.at), scramble=False).random(n + 1)[1:]
    sizes = np.resize(_SIZES_OF_DESIGN, n)
    return mode.at + (sizes[:, None] * ndtri(uniform)) @ np.linalg.cholesky(mode.cov).T


def _ridge(emulated: Emulated, sampled: Sampled) -> Proposal | None:
    """Return a proposal about ridges of log m, which is evaluated on the way; None where it has none.

    A scale that may be 0 has a thin tail, which predictions from values about the mode know nothing of, and few draws
    from farther out hit: their weights do not show that it is missed.
    """
    if emulated.predicted() is None:
        return None
    pool, bend = sampled.pool, sampled.bend

    def predict(y: Array) -> Array:
        g, value = bend.inverse(y), emulated.bounded()
        assert value is not None
        return value(g) - bend.log_slope(g)

    def evaluate(y: Array) -> Array:
        g = bend.inverse(y)
        return emulated.evaluate(g) - bend.log_slope(g)

    y, weights = bend.forward(pool.g), pool.weights()[0]
    sd = np.sqrt(weights @ (y - weights @ y) ** 2)
    mode = y[(pool.log_marginal - bend.log_slope(pool.g)).argmax()]
    found = ridges(predict, mode, sd, np.arange(y.shape[1]), evaluate)
    return None if found is None else Proposal(found, bend)


def _guess(emulated: Emulated, pool: Pool) -> Guess:
    """Return the predicted density, log m being evaluated where single draws would have much of the weight.

    Beyond what is known, a polynomial may rise without end.
    """
    seen: list[int] = []
    while True:
        predicted, value = emulated.predicted(), emulated.bounded()
        if predicted is None or value is None:
            raise Hopeless(Reason.HOPELESS, "the latent variables can be fitted at few of the hyperparameters")
        guess = Guess(value, predicted.whitening, pool)
        heavy = guess.weights.copy()
        heavy[seen] = 0.0
        worst = np.argsort(-heavy)[:_HEAVY_AT_ONCE]
        worst = worst[heavy[worst] >= _HEAVIEST]
        if not len(worst) or len(seen) >= _MOST_HEAVY:
            return guess
        emulated.evaluate(pool.g[worst])
        seen += worst.tolist()


def _tell(emulated: Emulated, pairs: WeightedPairs) -> None:
    """Let predictions know of the values at which they are farthest off, by weight: thin tails above all."""
    off = np.abs(pairs.weights - normalised_weights(pairs.predicted - pairs.log_density))
    for row in np.argsort(-off)[:_MOST_TOLD]:
        emulated.tell(pairs.g[row], float(pairs.log_by_elbo[row]))


def _moved(pairs: WeightedPairs, log_near: Array) -> float:
    """Return by how much the wide proposal moves a mean, in its errors."""
    before, after = pairs.without_wide(log_near), normalised_weights(pairs.log_marginal - pairs.log_density)
    values = np.concatenate([pairs.g, (pairs.g - after @ pairs.g) ** 2, pairs.means], axis=1)
    apart = values - after @ values
    error = np.sqrt(after**2 @ apart**2)
    spread = np.sqrt(after @ apart**2)
    spread[-pairs.means.shape[1] :] = np.sqrt(after @ (apart[:, -pairs.means.shape[1] :] ** 2 + pairs.sds**2))
    change = np.abs(before @ values - after @ values)
    large = change > _SMALL * spread
    return float((change[large] / error[large]).max(initial=0.0))
