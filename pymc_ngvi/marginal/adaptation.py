"""Proposals fitted to all draws so far, and looks at what they miss: far out, in thin tails, along ridges."""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.refusal import Reason, Refused
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.proposals import Base, Proposal, best_proposal, tempered
from pymc_ngvi.marginal.ridges import ridges, work_in_dimensions
from pymc_ngvi.marginal.rounds import ProposalRounds, moments_of_draws, moved, weights_of_draws
from pymc_ngvi.marginal.sampling import LogMarginalFunction, Pool, Round, Weighted, relative_sd_errors
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.marginal.tails import Bend

#: Looks about a proposal, at most; draws of each, the same where log m takes quadrature; and of the round after it.
_MOST_LOOKS, _N_LOOKED, _N_LOOKED_BY_QUADRATURE, _N_AFTER = 3, 256, 128, 1_024
#: How many times as many draws far out decide, where few move the moments of a pool.
_TIMES_MORE = 4
#: Evaluations of log p that following ridges may take, where they cost no quadrature.
_MOST_FOLLOWED = 30_000
#: Error of a standard deviation from which on its tail counts as thin: in that under a Gaussian; at least, where log m
#: takes quadrature.
_THIN, _SEEN = 1.5, 0.05
#: Draws at which log m is finite, at least.
_FEWEST_FINITE = 10


class Hopeless(Refused):
    """Proposals do not come near to the posterior of the globals; the sentence says so."""


class Adaptation:
    """Rounds of draws, and the proposals that are fitted to them.

    Parameters
    ----------
    function : callable
        From globals to log m.
    base : Base
        What moments shrink towards.
    bend : Bend
    df : float
        Degrees of freedom of proposals.
    rng : Generator
    is_plain : bool
        Whether log m takes no quadrature.
    start : StudentMixture, optional
        Of y: from whose components a kind of proposals is fitted.

    Attributes
    ----------
    rounds : ProposalRounds
    n_drawn : int
        Draws so far, those of pools not included.
    """

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
    ) -> None:
        self._function, self._base, self._bend, self._df, self._rng = function, base, bend, df, rng
        self._is_plain = is_plain
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
        together.evaluate_anew(self._function, first=1)
        return moved(self._in_y(before), self._in_y(together.pooled()))

    def _follow_ridges(self) -> None:
        """Draw about ridges of log m, along as many coordinates as the work allows, those of the thinnest tails."""
        draws = self.rounds.pooled()
        y = self._in_y(draws)
        p = y.g.shape[1]
        along = np.argsort(-relative_sd_errors(y.g, weights_of_draws(y)))[: _MOST_FOLLOWED // work_in_dimensions(p)]
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
