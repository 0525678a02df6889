"""From a Gaussian fit to the exact posterior: what is evaluated where, and when it is enough."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.adaptation import Adaptation
from pymc_ngvi.marginal.adaptation import Hopeless as Hopeless
from pymc_ngvi.marginal.forest import MOST_PLAIN
from pymc_ngvi.marginal.log_marginal import TOLERANCE, LogMarginal
from pymc_ngvi.marginal.nodes import PathRule, first_rule
from pymc_ngvi.marginal.proposals import (
    OF_DEFENCE,
    Proposal,
    base_proposal,
    effective_size,
    first_proposal,
    mixture_of,
    tempered,
)
from pymc_ngvi.marginal.referred import Referred
from pymc_ngvi.marginal.regression import Whitening, covering, n_polynomial
from pymc_ngvi.marginal.sampling import (
    LEAST_TAIL,
    LEAST_TAIL_OF_MANY,
    Plain,
    Pool,
    Round,
    Sampled,
    Sequences,
    evenly_picked,
    has_light_tail,
    relative_sd_errors,
    tail_size,
)
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.marginal.tails import find_bend

#: Effective size that the pool is to have, where nothing else is said.
WANTED = 2_000
#: Least degrees of freedom of proposals; width of the first one over that of q.
_LEAST_DF, _FIRST_SCALE = 7.0, 1.3
#: Part of the first proposal that goes to all modes, where there are several.
_OF_MODES = 0.75
#: Draws of the first round at least, and for each number that a polynomial has.
_FIRST, _PER_FEATURE = 96, 1.6
#: Draws on which rules are compared, and on which the base rule is checked.
_N_COMPARED, _N_CHECKED = 16, 48
#: Rounds of adaptation at most; efficiency at which they end; draws of a round at most.
_MOST_ROUNDS, _GOOD, _MOST_IN_ROUND = 8, 0.5, 1_024
#: Large rounds after which adapting is given up, and the efficiency below which it is.
_PATIENCE, _HOPELESS = 4, 0.005
#: Draws that the base rule is to be within reach of; how often it is looked at.
_N_COVERED, _MOST_COVERS = 512, 2
#: Numbers in what is kept of draws evaluated by the reference rule.
_MOST_KNOWN = 2**23
#: Draws from which the base rule is learned, at least, and for each number of its polynomial.
_LEAST_LEARNED, _LEARNED_PER_FEATURE = 96, 5.0
#: Residual of a base rule, an sd in nats: while proposals are adapted; for the pool. Power of m that draws count by.
_ROUGH, _RESIDUAL, _FLATTENED = 0.3, 0.15, 0.25
#: Change of log m that more nodes may bring while proposals are adapted, an sd in nats.
_ROUGH_RULE = 0.15
#: Part of the usual tolerance that it may bring before there is a pool: otherwise, that would often be evaluated twice.
_OF_TOLERANCE = 0.6
#: Variance of its predictions, in that of residuals, up to which they are used: while adapting; for the pool.
_ROUGH_REACH, _REACH = 3.0, 1.0
#: Draws of a pool for each one of its effective size, about.
DRAWS_PER_WANTED = 1.5
#: Pools that adapting and the pool take where all draws take all nodes: 1 to 7 in twenty trees of pairs.
_POOLS = 4.0
#: Difference between base and reference on draws held out, an sd in nats, beyond which the reference takes over.
MOST_DIFFERENCE = 0.15
#: k-hat of a first pool from which on the proposal is fitted anew; efficiency up to which it is; error of an sd from
#: which on it is; how often.
_HEAVY, _POOR, _UNSURE, _MOST_POOLS = 0.4, 0.3, 0.05, 3


class Sampler:
    """Samples the globals."""

    def __init__(
        self,
        function: LogMarginal | Plain | Callable[[Array], Array],
        mean: Array,
        cov: Array,
        seed: int,
        expect: Callable[[float], object] = bool,
        wanted: float = WANTED,
        others: Sequence[tuple[Array, Array]] = (),
        ratios: Sequence[tuple[int, int]] = (),
        look: Round | None = None,
        most_values: float = np.inf,
    ) -> None:
        self._look, self._most_values = look, most_values
        self._expect, self._wanted, self._others, self._ratios = expect, wanted, others, ratios
        self._quadrature = function if isinstance(function, LogMarginal) else None
        self._function = function if isinstance(function, LogMarginal | Plain) else Plain(function)
        self._mean, self._cov, self._p, self._df = mean, cov, len(mean), max(_LEAST_DF, float(len(mean)))
        self.sequences, self._rng = Sequences(self._function, seed), np.random.default_rng(seed)
        self._adaptation: Adaptation
        self._known: Referred  # by the reference rule

    def run(self) -> Sampled:
        """Adapt the proposal, then draw the pool."""
        self._bend = find_bend(lambda g: self._function(g)[0], self._mean, self._cov, self._ratios)
        self._base = base_proposal(self._bend, self._mean, self._cov)
        whitening = Whitening.by(self._bend, *self._base)
        self._function.standardise(whitening, self._bend)
        is_plain = self._quadrature is None and not self._is_predicted
        modes = self._at_modes() if self._others else None
        self._adaptation = Adaptation(
            self._function, self._base, self._bend, self._df, self._rng,
            is_plain=is_plain, start=modes, most_values=self._most_values,
        )  # fmt: skip
        proposal = self._adapted()
        near, adapted = self._adaptation.rounds.pooled(), proposal
        if not self._is_predicted:
            proposal = self._adaptation.looked_about(adapted)
        n_adapted = self._adaptation.n_drawn
        if self._quadrature is None:
            proposal, pool = self._with_tails(*self._pool(proposal))
            return Sampled(pool, proposal, self._bend, 0.0, n_adapted, self._adaptation.missed(proposal, pool))
        if proposal is not adapted:  # rules need not be right far out where nothing is
            near = self._adaptation.rounds.pooled()
        weights = _weights(tempered(near.log_weights, _N_COMPARED))
        if not self._needs_more_nodes(near.g, weights, _OF_TOLERANCE * TOLERANCE):
            self._learn_from_more(near.g, weights)
        proposal, pool, difference = self._settled(proposal)
        missed = self._adaptation.missed(proposal, pool)
        return Sampled(pool, proposal, self._bend, difference, n_adapted, missed)

    def _settled(self, proposal: Proposal) -> tuple[Proposal, Pool, float]:
        """Return a pool on which rules have been checked, its proposal, and the difference between the rules."""
        quadrature = self._quadrature
        assert quadrature is not None
        pool, least, taught = None, self._least_nodes, False
        while True:
            is_learned = self._learn(_RESIDUAL, least)
            self._expect_by(quadrature.rule if quadrature.base is None else quadrature.base.rule)
            if is_learned:
                self._cover(proposal, least)
            proposal, pool = self._pool(proposal, pool)
            weights = pool.weights()[0]
            if self._needs_more_nodes(pool.g, weights):
                least = self._least_nodes
                continue
            difference = self._check(pool.g, pool.log_marginal, weights)  # 0 where there is no base rule
            if difference < MOST_DIFFERENCE or quadrature.base is None:
                proposal, last = self._with_tails(proposal, pool)
                if last is not pool:
                    difference = self._check(last.g, last.log_marginal, last.weights()[0])
                return proposal, last, difference
            # The draws just checked teach the rule where it is wrong; once taught, it gets more nodes.
            least = quadrature.base.rule.n_nodes + taught
            taught = not taught

    # --- steps ---

    def _at_modes(self) -> StudentMixture:
        """Return a component of y at each mode."""
        return mixture_of([self._base, *(base_proposal(self._bend, mean, cov) for mean, cov in self._others)], self._df)

    @property
    def _n_first(self) -> int:
        return max(_FIRST, int(_PER_FEATURE * n_polynomial(self._p)))

    def _adapted(self) -> Proposal:
        """Return a proposal that is near to the posterior."""
        scale = _FIRST_SCALE ** min(1.0, 4.0 / self._p)
        proposal = first_proposal(self._base, self._bend, self._df, scale)
        adaptation, n = self._adaptation, self._n_first
        if self._others:
            proposal = Proposal(proposal.mixture.joined(self._at_modes(), _OF_MODES), self._bend)
            n *= 1 + len(self._others)
        adaptation.drawn(proposal, n, lambda g: self._first_values(proposal, g))
        if self._look is not None:
            adaptation.begin_from(self._look)
        efficiencies: list[float] = []
        n_large = 0
        for i in range(_MOST_ROUNDS):
            n = min(2 * n, _MOST_IN_ROUND)
            last = adaptation.drawn(adaptation.best(), n)
            if i == 0:
                adaptation.rounds.forget_first()  # it is about q, and only used while there is no other
            efficiencies.append(last.efficiency)
            weights = _weights(tempered(last.log_weights, _N_CHECKED))
            difference = self._check(last.g, last.log_marginal, weights)
            is_good = last.efficiency > _GOOD or (last.efficiency > _POOR and not self._pays(efficiencies, n))
            if is_good and difference < _ROUGH:
                break
            if n == _MOST_IN_ROUND:
                n_large += 1
                if n_large >= _PATIENCE and max(efficiencies[-_PATIENCE:]) < _HOPELESS:
                    said = f"importance sampling of {self._p} global parameters does not come near to them"
                    raise Hopeless(Reason.HOPELESS, said)
            # Rules that are right are left alone: new ones would have all draws evaluated anew.
            is_right = self._quadrature is None or (self._quadrature.base is not None and difference < _ROUGH)
            if not is_right and self._learn(_ROUGH, self._least_nodes):
                adaptation.rounds.evaluate_anew(self._function)
        return adaptation.best()

    def _pays(self, efficiencies: Sequence[float], n: int) -> bool:
        """Tell whether the last round of adaptation saves the pool as many draws as it took, ``n``."""
        if self._is_predicted or len(efficiencies) < 2 or not max(efficiencies[:-1]) > 0.0:
            return True
        return self._wanted * (1.0 / max(efficiencies[:-1]) - 1.0 / efficiencies[-1]) > n

    def _first_values(self, proposal: Proposal, g: Array) -> Array:
        """Return log m at the draws of the first round; learn centres and rules from them."""
        quadrature = self._quadrature
        if quadrature is None:
            return self._function(g)[0]
        points = quadrature.reference(g)
        quadrature.learn_centres(points)
        log_weights = points.log_marginal - proposal.log_density(g)
        if not np.isfinite(log_weights).any():
            raise Hopeless(Reason.HOPELESS, "log p is not finite at draws about the Gaussian fit")
        rows = evenly_picked(_weights(tempered(log_weights, 20.0)), _N_COMPARED, self._rng.random())
        before = quadrature.rule
        self._choose_rule(points[rows], 0, _ROUGH_RULE)
        if quadrature.rule != before:
            rows = np.unique(
                evenly_picked(_weights(tempered(log_weights, self._n_learned)), self._n_learned, self._rng.random())
            )
            points = quadrature.reference(g[rows])
        self._known = points
        self._learn(_ROUGH, self._least_nodes)
        return self._function(g)[0]

    def _choose_rule(self, points: Referred, least: int, tolerance: float) -> None:
        quadrature = self._quadrature
        assert quadrature is not None
        quadrature.choose_rule(points, least=least, tolerance=tolerance)
        if quadrature.rule.n_nodes > 2 * first_rule(quadrature.forest.n_levels).n_nodes:  # which its price is of
            self._expect_by(quadrature.rule)

    def _expect_by(self, rule: PathRule) -> None:
        """Say what draws take by this rule."""
        self._expect(_POOLS * DRAWS_PER_WANTED * self._wanted * len(rule.nodes))

    def _needs_more_nodes(self, g: Array, weights: Array, tolerance: float = TOLERANCE) -> bool:
        """Tell whether the reference, chosen about the first proposal, has too few nodes at the posterior; mend it."""
        quadrature = self._quadrature
        assert quadrature is not None
        before = quadrature.rule
        rows = np.unique(evenly_picked(weights, _N_COMPARED, self._rng.random()))
        self._choose_rule(quadrature.reference(g[rows]), before.n_nodes, tolerance)
        if quadrature.rule == before:
            return False
        picked = evenly_picked(weights, self._n_learned, self._rng.random())
        rows = np.union1d(picked, quadrature.farthest(g, weights, self._known.g))
        self._known = quadrature.reference(g[rows])
        return True

    def _learn_from_more(self, g: Array, weights: Array) -> None:
        """See that rules are learned from draws enough: about few, most of the pool would be far from what is known."""
        quadrature = self._quadrature
        assert quadrature is not None
        if (n_missing := self._n_learned - len(self._known.g)) > 0:
            picked = evenly_picked(weights, n_missing, self._rng.random())
            rows = np.union1d(picked, quadrature.farthest(g, weights, self._known.g))
            self._known = Referred.joined([self._known, quadrature.reference(g[rows])])

    def _learn(self, tolerance: float, least: int) -> bool:
        """Learn centres and the base rule from all that is known; tell whether there is a base rule."""
        quadrature = self._quadrature
        if quadrature is None:
            return False
        known = self._known
        finite = np.isfinite(known.log_marginal)
        top = known.log_marginal[finite].max()
        weights = np.exp(_FLATTENED * np.where(finite, known.log_marginal - top, -np.inf))
        quadrature.learn_centres(known, weights)
        reach = _REACH if tolerance < _ROUGH else _ROUGH_REACH
        quadrature.learn_base(known, weights, tolerance=tolerance, least=least, reach=reach)
        return quadrature.base is not None

    def _cover(self, proposal: Proposal, least: int) -> None:
        """See that the base rule is within reach of nearly all draws of a proposal: others take the reference."""
        quadrature = self._quadrature
        assert quadrature is not None
        assert quadrature.whitening is not None
        for _ in range(_MOST_COVERS):
            base, known = quadrature.base, self._known
            assert base is not None
            g = proposal.draws(_N_COVERED, self._rng)
            log_density = proposal.log_density(g)
            weights = np.exp(_FLATTENED * (log_density - log_density.max()))
            rows = covering(base.gram, quadrature.whitening.features(g), weights, base.reach, self._n_learned)
            if not len(rows):
                return
            points = quadrature.reference(g[rows])
            self._known = Referred.joined([known, points])
            self._learn(_RESIDUAL, least)
            if not base.rule.n_nodes and not quadrature.is_right_at(points, _RESIDUAL):
                self._learn(_RESIDUAL, 1)  # a polynomial alone may be too stiff where one node is not
            most = max(base.rule.n_nodes, 1)
            if not quadrature.is_right_at(points, _RESIDUAL) or (
                quadrature.base and quadrature.base.rule.n_nodes > most
            ):
                self._known = known  # no polynomial goes so far
                self._learn(_RESIDUAL, least)
                return

    def _check(self, g: Array, log_marginal: Array, weights: Array) -> float:
        """Return how far log m is from the reference at some draws, an sd in nats, and remember these."""
        quadrature = self._quadrature
        if quadrature is None or quadrature.base is None:
            return 0.0
        rows = np.unique(evenly_picked(weights, _N_CHECKED, self._rng.random()))
        far = np.setdiff1d(quadrature.farthest(g, weights, self._known.g), rows)
        points = quadrature.reference(g[rows])
        self._known = Referred.joined([self._known, *([quadrature.reference(g[far])] if len(far) else []), points])
        most = max(self._n_learned, _MOST_KNOWN // quadrature.forest.n_local)
        if len(self._known.g) > most:  # the last ones are nearest to the posterior
            self._known = self._known[np.arange(len(self._known.g) - most, len(self._known.g))]
        apart = points.log_marginal - log_marginal[rows]
        return float(np.std(apart)) if np.isfinite(apart).all() else np.inf

    @property
    def _least_nodes(self) -> int:
        # One node follows no skewness that changes with the scale, as it does where a scale may be 0.
        return 2 if self._bend.tails else 0

    @property
    def _n_learned(self) -> int:
        assert self._quadrature is not None
        return max(_LEAST_LEARNED, int(_LEARNED_PER_FEATURE * self._quadrature.n_features))

    @property
    def _is_predicted(self) -> bool:
        # By a function of its own, from few values: far from these, it tells nothing of what was missed.
        return self._quadrature is None and type(self._function) is not Plain

    def _defended(self, proposal: Proposal) -> Proposal:
        """Return a proposal of which a part is far wider."""
        if self._is_predicted:
            return proposal
        # Wider draws take longest where there is quadrature.
        wide = proposal.defended(OF_DEFENCE if self._quadrature is None else OF_DEFENCE / 2.0)
        if not self._others:
            return wide
        modes = replace(self._at_modes(), df=float(np.min(wide.mixture.df)))  # it may differ between components
        return Proposal(modes.joined(wide.mixture, 1.0 - OF_DEFENCE), self._bend, wide.n_far)

    def _pool(self, proposal: Proposal, pool: Pool | None = None) -> tuple[Proposal, Pool]:
        """Return a pool and its proposal, which is fitted anew to a first pool that is not good enough.

        An earlier pool is evaluated anew.
        """
        if pool is None:
            proposal = self._defended(proposal)
            pool = self.sequences.first(proposal)
        else:
            pool = self.sequences.again(pool, proposal)
        latest = proposal, pool
        for _ in range(_MOST_POOLS):
            khat, efficiency = pool.weights()[1], effective_size(pool.log_ratio) / len(pool.g)
            errors = relative_sd_errors(self._bend.forward(pool.g), pool.weights()[0])
            is_sure = errors.max() < _UNSURE and tail_size(pool.g, pool.weights()[0]) > LEAST_TAIL
            is_sure = is_sure and self._adaptation.missed(proposal, pool) < 1.0
            is_large = effective_size(pool.log_ratio) >= self._wanted and has_light_tail(khat, len(pool.g))
            if is_sure and (is_large or (khat < _HEAVY and efficiency > _POOR)):
                break
            new = self._fitted_anew(*latest)
            if self._is_predicted:  # draws cost nothing
                proposal, pool = latest = new, self.sequences.first(new)
            else:
                pool, proposal, more = self.sequences.beside(pool, proposal, new)
                latest = new, more
        return proposal, self.sequences.enlarged(pool, proposal, self._wanted)

    def _with_tails(self, proposal: Proposal, pool: Pool) -> tuple[Proposal, Pool]:
        """Return a pool with draws enough in its tails, and its proposal, as far as others can be taught.

        Of many globals in trees, tails that no draw has reached teach nothing: a walk with 23 of them came out exact,
        and its scale 0.16 sds off. There are twice as many draws of the same, where that may be enough.
        """
        if self._is_predicted:
            return proposal, pool
        if self._quadrature is not None and self._p > MOST_PLAIN:
            weights, khat = pool.weights()
            part = tail_size(pool.g, weights) / LEAST_TAIL_OF_MANY
            if 0.5 < part <= 1.0 and has_light_tail(khat, len(pool.g)):
                pool = self.sequences.enlarged(pool, proposal, 2.0 * effective_size(pool.log_ratio))
            return proposal, pool
        for _ in range(_MOST_POOLS):
            weights, khat = pool.weights()
            if has_light_tail(khat, len(pool.g)) and tail_size(pool.g, weights) > LEAST_TAIL:
                break
            if self._quadrature is not None:
                prices.expect(1.0)
            # A large pool has draws in tails that small ones know nothing of.
            proposal = self._fitted_anew(proposal, pool)
            pool = self.sequences.enlarged(self.sequences.first(proposal), proposal, self._wanted)
        return proposal, pool

    def _fitted_anew(self, proposal: Proposal, pool: Pool) -> Proposal:
        """Return a proposal that a pool has taught."""
        self._adaptation.add(proposal, pool)
        return self._defended(self._adaptation.best())


def _weights(log_weights: Array) -> Array:
    return np.exp(log_weights - log_weights.max())
