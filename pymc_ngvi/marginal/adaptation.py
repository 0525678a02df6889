"""Proposals fitted to all draws so far, and looks at what they miss: far out, in thin tails, along ridges."""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import Reason, Refused
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.proposals import Base, Proposal, best_proposal, mixture_of, tempered
from pymc_ngvi.marginal.ridges import components_above, ridges, work_in_dimensions, work_of_climb
from pymc_ngvi.marginal.sampling import LogMarginalFunction, Pool, Round, Weighted, relative_sd_errors
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.marginal.tails import Bend

# --- all rounds of draws together, as draws of the mixture of their proposals [1]_ ---
# None is left out because its weights are uneven: they are where a proposal has found what the ones before it missed,
#    and
# a proposal that misses the same again looks good.
#
# References
# ----------
# .. [1] J.-M. Cornuet, J.-M. Marin, A. Mira, C. P. Robert (2012). Adaptive multiple importance sampling. Scandinavian
#    Journal of Statistics 39(4). https://doi.org/10.1111/j.1467-9469.2011.00756.x

#: Nats below the largest weight from which on draws are not evaluated anew: all of them together have none to speak of.
_NO_WEIGHT = 12.0
#: What moments may move by: in standard deviations; in standard errors, those that a Gaussian has.
_MAY_MOVE, _ERRORS = 0.05, 2.0


class ProposalRounds:
    """Rounds of draws, and the log density of each proposal at each draw, which is evaluated once."""

    def __init__(self) -> None:
        self._rounds: list[Round] = []
        self._log_q: list[list[Array]] = []  # of each proposal at the draws of each round

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self._rounds)

    def add(self, new: Round) -> None:
        """Add a round."""
        for row, one in zip(self._log_q, self._rounds, strict=True):
            row.append(one.proposal.log_density(new.g))
        self._rounds.append(new)
        self._log_q.append([new.proposal.log_density(one.g) for one in self._rounds])

    def forget_first(self) -> None:
        """Leave the first round out."""
        self._rounds = self._rounds[1:]
        self._log_q = [row[1:] for row in self._log_q[1:]]

    def pooled(self) -> Weighted:
        """Return the draws of all rounds, weighted as draws of the mixture of their proposals."""
        sizes = np.array([len(one.g) for one in self._rounds])
        shares = np.log(sizes / sizes.sum())
        log_q = logsumexp([share + np.concatenate(row) for share, row in zip(shares, self._log_q, strict=True)], axis=0)
        log_marginal = np.concatenate([one.log_marginal for one in self._rounds])
        return Weighted(np.concatenate([one.g for one in self._rounds]), log_marginal, log_marginal - log_q)

    def evaluate_anew(self, function: LogMarginalFunction, first: int = 0) -> None:
        """Evaluate log m anew at the draws that have weight, of the rounds from ``first`` on."""
        log_weights = self.pooled().log_weights
        has_weight = log_weights > log_weights.max() - _NO_WEIGHT
        start = 0
        for i, one in enumerate(self._rounds):
            rows = np.flatnonzero(has_weight[start : start + len(one.g)])
            start += len(one.g)
            if len(rows) and i >= first:
                values = one.log_marginal.copy()
                values[rows] = function(one.g[rows])[0]
                self._rounds[i] = Round(one.proposal, one.g, values)


def weights_of_draws(draws: Weighted) -> Array:
    """Return weights that add up to 1, of draws of which one has weight at least."""
    weights = np.exp(draws.log_weights - draws.log_weights.max())
    return weights / weights.sum()


def moments_of_draws(draws: Weighted) -> tuple[Array, Array]:
    """Return means and standard deviations, (p,) each, of weighted draws."""
    weights = weights_of_draws(draws)
    mean = weights @ draws.g
    return mean, np.sqrt(weights @ (draws.g - mean) ** 2)


def moved(before: Weighted, after: Weighted) -> float:
    """Return by how much more draws move moments, in what they may: more than 1 says that some of the mass was missed.

    The most of all means and standard deviations. A mean may move by .05 standard deviations, and one of these by 5 %;
    either by two of the standard errors that a Gaussian has, where that is more: after few draws. inf where nothing can
    be said.
    """
    if not (np.isfinite(before.log_weights).any() and np.isfinite(after.log_weights).any()):
        return np.inf
    (mean, sd), (new_mean, new_sd) = moments_of_draws(before), moments_of_draws(after)
    if not ((sd > 0.0) & (new_sd > 0.0)).all():
        return np.inf
    error = float(np.sqrt(np.sum(weights_of_draws(before) ** 2)))
    of_mean, of_sd = max(_MAY_MOVE, _ERRORS * error), max(_MAY_MOVE, _ERRORS * error / np.sqrt(2.0))
    return float(max((np.abs(new_mean - mean) / new_sd).max() / of_mean, np.abs(np.log(new_sd / sd)).max() / of_sd))


# --- proposals fitted to all draws so far, and looks at what they miss: far out, in thin tails, along ridges ---

#: Looks about a proposal, at most; draws of each, the same where log m takes quadrature; and of the round after it.
_MOST_LOOKS, _N_LOOKED, _N_LOOKED_BY_QUADRATURE, _N_AFTER = 3, 256, 128, 1_024
#: How many times as many draws far out decide, where few move the moments of a pool.
_TIMES_MORE = 4
#: Evaluations of log p that following ridges may take, where they cost no quadrature.
_MOST_FOLLOWED = 30_000
#: Error of a standard deviation from which on its tail counts as thin: in that under a Gaussian; at least, where log m
#: takes quadrature.
_THIN, _SEEN = 1.5, 0.05
#: Scales of a Gaussian fit about which components begin; the heaviest draws of a look from which log p is climbed, and
#: the part of the values that may be taken which that may take.
SCALES, _N_CLIMBS, _OF_CLIMBS = (1.0, 0.1, 3.0, 10.0), 4, 0.1
#: Draws at which log m is finite, at least.
_FEWEST_FINITE = 10


class Hopeless(Refused):
    """Proposals do not come near to the posterior of the globals; the sentence says so."""


class Adaptation:
    """Rounds of draws, and the proposals that are fitted to them."""

    def __init__(
        self,
        function: LogMarginalFunction,
        base: Base,
        bend: Bend,
        df: float,
        rng: np.random.Generator,
        *,
        is_plain: bool,
        start: StudentMixture | None = None,
        most_values: float = np.inf,
    ) -> None:
        self._function, self._base, self._bend, self._df, self._rng = function, base, bend, df, rng
        self._is_plain, self._most_followed = is_plain, min(_MOST_FOLLOWED, 0.5 * most_values)
        self._most_climbed = _OF_CLIMBS * most_values
        self._least_error = 0.0 if is_plain else _SEEN
        self.rounds, self.n_drawn = ProposalRounds(), 0
        self._far: list[Round] = []
        self._has_looked_again = False
        self._ridges = start

    def drawn(self, proposal: Proposal, n: int, values: Callable[[Array], Array] | None = None) -> Round:
        """Return a round of draws, which is added to those there are; ``values`` evaluates log m, if not the usual."""
        g = proposal.draws(n, self._rng)
        self.rounds.add(new := Round(proposal, g, self._function(g)[0] if values is None else values(g)))
        self.n_drawn += n
        return new

    def begin_from(self, look: Round) -> None:
        """Let proposals begin from the scales of a look, too, and from modes above its heaviest draws."""
        self.rounds.add(look)
        p, start = len(self._base.mean), self._ridges
        scales = mixture_of([Base(self._base.mean, scale * self._base.factor) for scale in SCALES], self._df)
        self._ridges = scales if start is None else start.joined(scales, 0.5)
        if _N_CLIMBS * work_of_climb(p) > self._most_climbed:
            return
        heaviest = np.argsort(-look.log_weights)[:_N_CLIMBS]
        sd = np.linalg.norm(self._base.factor, axis=1)
        found = components_above(self._of_y, self._bend.forward(look.g[heaviest]), sd)
        self._ridges = self._ridges.joined(found, 0.5)
        self.drawn(Proposal(found, self._bend), _N_AFTER)

    def add(self, proposal: Proposal, pool: Pool) -> None:
        """Add the draws of a pool."""
        self.rounds.add(Round(proposal, pool.g, pool.log_marginal))

    def best(self) -> Proposal:
        """Return the proposal that is best for all draws; where tails are thin, more of it goes there.

        The variance of an estimated mean of f is least for draws in proportion to p |f| [1]_: of p itself, and of
        squares of coordinates whose tails are thin.

        References
        ----------
        .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, section 9.1.
           https://artowen.su.domains/mc/
        """
        draws = self.rounds.pooled()
        if np.isfinite(draws.log_weights).sum() < _FEWEST_FINITE:
            raise Hopeless(Reason.HOPELESS, "log p is not finite at draws about the Gaussian fit")
        squares = np.log1p(thin_squares(self._in_y(draws), self._least_error))
        weights = tempered(draws.log_weights + squares, max(2.5 * min(len(self._base.mean), 12), 25.0))
        log_marginal = draws.log_marginal + squares
        return best_proposal(draws.g, weights, log_marginal, self._base, self._bend, self._df, self._ridges)

    def looked_about(self, proposal: Proposal) -> Proposal:
        """Return a proposal that has seen what is far from it: fitted anew while draws far out move its moments."""
        for turn in range(_MOST_LOOKS):
            before = self.rounds.pooled()
            n = _N_LOOKED if self._is_plain else _N_LOOKED_BY_QUADRATURE
            self._far.append(self.drawn(proposal.far(), n))
            after = self.rounds.pooled()
            before, after = self._in_y(before), self._in_y(after)
            if moved(before, after) < 1.0 and not thin_tails(after, self._least_error).any():
                return proposal
            if turn == 0 and self._is_plain:
                self._follow_ridges()
            self.drawn(self.best(), _N_AFTER)
            proposal = self.best()
        return proposal

    def missed(self, proposal: Proposal, pool: Pool) -> float:
        """Return by how much draws far out move the moments of a pool, in what they may: see `moved`.

        One of few has a large weight where there are hardly any like it, which may be luck: of more, it has less.
        """
        result = self._moved(proposal, pool)
        if result < 1.0 or self._has_looked_again or not self._far:
            return result
        self._has_looked_again = True
        last = self._far[-1]
        self._far.append(self.drawn(last.proposal, _TIMES_MORE * len(last.g)))
        return self._moved(proposal, pool)

    def _moved(self, proposal: Proposal, pool: Pool) -> float:
        together = ProposalRounds()
        together.add(Round(proposal, pool.g, pool.log_marginal))
        before = together.pooled()
        for one in self._far:
            together.add(one)
        if not self._is_plain:  # rules have learned since
            together.evaluate_anew(self._function, first=1)
        return moved(self._in_y(before), self._in_y(together.pooled()))

    def _follow_ridges(self) -> None:
        """Draw about ridges of log m, along as many coordinates as the work allows, those of the thinnest tails."""
        draws = self.rounds.pooled()
        y = self._in_y(draws)
        p = y.g.shape[1]
        along = np.argsort(-relative_sd_errors(y.g, weights_of_draws(y)))[
            : int(self._most_followed / work_in_dimensions(p))
        ]
        found = ridges(self._of_y, y.g[y.log_marginal.argmax()], moments_of_draws(y)[1], along) if len(along) else None
        if found is not None:
            self._ridges = found if self._ridges is None else self._ridges.joined(found, 0.5)
            self.drawn(Proposal(found, self._bend), _N_AFTER)

    def _in_y(self, draws: Weighted) -> Weighted:
        """Return draws in coordinates without straight tails: components of proposals see to these."""
        return draws._replace(g=self._bend.forward(draws.g))

    def _of_y(self, y: Array) -> Array:
        """Return the log density of y."""
        g = self._bend.inverse(y)
        return self._function(g)[0] - self._bend.log_slope(g)


def thin_tails(draws: Weighted, least: float = 0.0) -> NDArray[np.bool_]:
    """Tell of which coordinates the sd is known less well than that of a Gaussian, and than ``least``, (p,)."""
    weights = weights_of_draws(draws)
    of_gaussian = float(np.sqrt(0.5 * np.sum(weights**2)))
    return relative_sd_errors(draws.g, weights) > max(least, _THIN * of_gaussian)


def thin_squares(draws: Weighted, least: float = 0.0) -> Array:
    """Return the largest square of coordinates with thin tails, standardised, (n,); 0 where there are none."""
    thin = thin_tails(draws, least)
    mean, sd = moments_of_draws(draws)
    z = (draws.g[:, thin] - mean[thin]) / np.where(sd[thin] > 0.0, sd[thin], 1.0)
    return np.max(z**2, axis=1, initial=0.0)
