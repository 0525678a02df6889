"""log m(g), the log density of the globals with all local coordinates integrated out.

By the *reference* rule, whose nodes are about centres that the quadrature itself confirms; or by a cheap *base* rule at
predicted centres, plus a polynomial of the globals that was fitted to the difference between the two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.confirmed import confirmed
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.nodes import WIDE, PathRule, bases, first_rule, references
from pymc_ngvi.marginal.parts import TermsOfBlocks
from pymc_ngvi.marginal.quadrature import by_rule, integrate
from pymc_ngvi.marginal.referred import Referred, Remembered
from pymc_ngvi.marginal.regression import BaseRule, Whitening, gram_of, leverage_of, predictor
from pymc_ngvi.marginal.tails import Bend

#: Corrections of centres from which on the nodes are as many as can be had.
_WIDEST_FROM = 3
#: Range of predicted log scales.
_LOG_SCALE = 12.0
#: Change of log m, an sd over draws in nats, that the next rule may bring.
TOLERANCE = 0.03
#: Local coordinates from which on a polynomial alone is tried; residual that it may have, in that of a base rule.
_MANY, _OF_TOLERANCE = 1_000, 0.4
#: Draws at which regressions extrapolate most, and the part of the weight that they are of.
_N_FAR, _OF_WEIGHT = 12, 0.999
#: Part of a slope that may be rounding.
_ROUNDING = 1e-6
#: Factor by which centres of base rules may be further off than those of the reference.
_SLACK = 1.3


@dataclass
class LogMarginal:
    """log m(g) by quadrature."""

    terms: TermsOfBlocks
    forest: Forest
    #: From globals to the centres to begin with: those of q. None where centres have been learned already.
    first_centres: Callable[[Array], Centres] | None
    #: The reference.
    rule: PathRule = field(init=False)
    base: BaseRule | None = None
    #: Change of log m that the next larger rule brings, an sd over draws; NaN before a choice was made.
    rule_error: float = float("nan")
    #: Draws whose centres had to be corrected.
    n_corrected: int = 0
    whitening: Whitening | None = None
    skew: Array | None = None
    #: Whether log p is known to be concave in each local coordinate given all else, or is not of one.
    is_concave: bool = True
    _coefficients: Array | None = None
    _remembered: Remembered | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.rule = first_rule(self.forest.n_levels, is_concave=self.is_concave)

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Evaluate by the reference once at each point, for as long as the posterior is made.

        Later, what is asked for is to be the same whatever was asked before.
        """
        self._remembered = Remembered()
        try:
            yield
        finally:
            self._remembered = None

    def standardise(self, whitening: Whitening, bend: Bend) -> None:
        """Predict in standardised globals from now on."""
        self.whitening = whitening

    def content(self) -> dict[str, Any]:
        """Return what was learned, for files: all but the terms, the forest and the map to y."""
        assert self.whitening is not None
        names = ("rule", "base", "rule_error", "skew", "_coefficients")
        whitening = {"mean": self.whitening.mean, "factor": self.whitening.factor}
        return {"whitening": whitening, **{name.lstrip("_"): getattr(self, name) for name in names}}

    @classmethod
    def of_content(cls, content: dict[str, Any], terms: TermsOfBlocks, forest: Forest, bend: Bend) -> "LogMarginal":
        """Return the inverse of `content`; ``bend`` maps globals to y."""
        of_rule = {name: content[name] for name in ("base", "rule_error", "skew")}
        whitening = Whitening.by(bend, **content["whitening"])
        result = cls(terms, forest, None, **of_rule, whitening=whitening)
        result.rule, result._coefficients = content["rule"], content["coefficients"]
        n_targets = 2 * forest.n_local + sum(int((forest.level > at).sum()) for at in range(forest.n_levels - 1))
        shapes = [np.shape(content[name]) for name in ("coefficients", "skew")]
        shapes.append(np.shape(content["whitening"]["factor"]))
        p = forest.n_globals
        base = result.base is None or (
            isinstance(result.base, BaseRule)
            and result.base.coefficients.shape == (result.n_features,)
            and result.base.gram.shape == (result.n_features, result.n_features)
        )
        right = shapes == [(whitening.n_without_cubes, n_targets), (forest.n_local,), (p, p)] and base
        if not right or not isinstance(result.rule, PathRule) or result.rule.n_levels != forest.n_levels:
            raise ValueError("the regressions of the exact posterior do not go with its forest")
        return result

    @property
    def n_features(self) -> int:
        """Numbers of a polynomial of the globals."""
        assert self.whitening is not None
        return self.whitening.n_features

    # --- by the reference rule ---

    def reference(self, g: Array) -> Referred:
        """Evaluate by the reference rule, about centres that are corrected until they are right."""
        size = max(1, AT_ONCE // (self.forest.n_local * self.forest.n_levels**2))
        parts = [g[start : start + size] for start in range(0, len(g), size)]
        if self._remembered is None:
            return Referred.joined([self._reference(part) for part in parts])
        return Referred.joined([self._remembered.at(part, self.rule, self._reference) for part in parts])

    def _reference(self, g: Array) -> Referred:
        first = self.first_centres if self._coefficients is None else None
        return self._confirmed(g, self.predicted(g) if first is None else first(g), self.rule)

    def _confirmed(self, g: Array, centres: Centres, rule: PathRule) -> Referred:
        """Evaluate about given centres, which are corrected."""
        n, n_local = len(g), self.forest.n_local
        log_marginal, lost = np.zeros(n), np.zeros(n, dtype=bool)
        found, skew = Centres.empty(n, self.forest), np.empty((n_local, n)).T
        plan = self.terms.plan(self.forest, n, len(rule.nodes))
        n_corrected = np.zeros(n, dtype=np.intp)
        for part in plan.parts:
            one = confirmed(part, rule, g, centres, self._wider, plan.size)
            log_marginal += one.log_marginal
            found.put(slice(None), part.places, one.centres)
            skew[:, part.places] = one.skew
            lost |= one.lost
            n_corrected = np.maximum(n_corrected, one.n_corrected)
        self.n_corrected += int(n_corrected.sum())
        bad = ~np.isfinite(log_marginal)
        return Referred(g, np.where(bad, -np.inf, log_marginal), found, skew, lost | bad)

    def _wider(self, turn: int) -> PathRule:
        rules = references(self.forest.n_levels)
        wide = rules[len(rules) // 4 if turn < _WIDEST_FROM else min(4, len(rules) - 1)]
        return max(self.rule, wide, key=lambda rule: rule.n_nodes)

    # --- centres by regression ---

    def learn_centres(self, points: Referred, weights: Array | None = None) -> None:
        """Fit the regression that predicts centres, of draws with weights up to 1."""
        assert self.whitening is not None
        features = self.whitening.features(points.g, cubes=False)
        weights = np.where(points.lost, 0.0, 1.0 if weights is None else weights)
        self._coefficients = predictor(features, self._targets(points.centres), weights, points.g.shape[1])
        self.skew = np.clip(np.median(points.skew, axis=0), -1.5, 1.5)

    def _targets(self, centres: Centres) -> Array:
        """Return conditional means, log scales, and the other entries of the factor over the scale of their column."""
        forest = self.forest
        own = centres.own(forest)
        columns = [centres.mean, np.log(own)]
        for level in range(forest.n_levels - 1):
            below = np.flatnonzero(forest.level > level)
            columns.append(centres.factor[:, below, level] / own[:, below])
        return np.concatenate(columns, axis=1)

    def predicted(self, g: Array) -> Centres:
        """Return the centres that the regression predicts."""
        assert self.whitening is not None
        assert self._coefficients is not None
        forest, n_local = self.forest, self.forest.n_local
        # In memory, draws are neighbours.
        values = (self._coefficients.T @ self.whitening.features(g, cubes=False).T).T
        own = np.exp(np.clip(values[:, n_local : 2 * n_local], -_LOG_SCALE, _LOG_SCALE))
        if forest.n_levels == 1:
            return Centres(values[:, :n_local], own[:, :, None])
        factor = Centres.empty(len(g), forest).factor
        factor[:, np.arange(n_local), forest.level] = own
        start = 2 * n_local
        for level in range(forest.n_levels - 1):
            below = np.flatnonzero(forest.level > level)
            factor[:, below, level] = values[:, start : start + len(below)] * own[:, below]
            start += len(below)
        return Centres(values[:, :n_local], factor)

    def centres(self, g: Array) -> Centres:
        """Return centres that are right: as predicted within reach of a base rule, corrected elsewhere."""
        if self.base is None or self.whitening is None:
            return self.reference(g).centres
        found = self.predicted(g)
        far = np.flatnonzero(self.base.is_beyond(self.whitening.features(g)))
        if not len(far):
            return found
        every = np.ones((len(far), self.forest.n_local), dtype=bool)
        return found.replaced(far, self.reference(g[far]).centres, every)

    def farthest(self, g: Array, weights: Array, known: Array) -> NDArray[np.intp]:
        """Return the rows, of those that carry weight, where regressions on the globals ``known`` extrapolate most."""
        assert self.whitening is not None
        order = np.argsort(-weights)
        total = np.cumsum(weights[order])
        bulk = order[: 1 + int(np.searchsorted(total, _OF_WEIGHT * total[-1]))]
        features = self.whitening.features(known)
        leverage = leverage_of(gram_of(features, np.ones(len(known))), self.whitening.features(g[bulk]))
        return bulk[np.argsort(-leverage)[:_N_FAR]]

    # --- how many nodes ---

    def choose_rule(self, points: Referred, *, least: int = 0, tolerance: float = TOLERANCE) -> None:
        """Take the fewest nodes, ``least`` or more, whose log m is but for a constant that of the next two rules.

        One more rule may err in the same direction. A rougher ``tolerance`` holds from the first rule on. Where there
        may be other modes, there are as many nodes as reach them.
        """
        rules, usual = references(self.forest.n_levels), first_rule(self.forest.n_levels).n_nodes
        if not self.is_concave and self._may_have_modes(points):
            least = max(least, WIDE)
        values: list[Array] = []

        def error(at: int, other: int) -> float:
            for rule in rules[first + len(values) : other + 1]:
                integral = integrate(self.terms, self.forest, rule, points.g, points.centres, moments=False)
                values.append(integral.log_marginal)
            return float(np.std(values[other - first] - values[at - first]))

        first = min(next(i for i, r in enumerate(rules) if r.n_nodes >= least), len(rules) - 2)
        for i in range(first, len(rules) - 1):
            self.rule_error = error(i, i + 1)
            limit = tolerance if rules[i].n_nodes >= usual else min(tolerance, TOLERANCE)
            if self.rule_error < limit and i + 2 < len(rules):
                self.rule_error = max(self.rule_error, error(i, i + 2))
            if self.rule_error < limit:
                self.rule = rules[i] if rules[i].n_nodes >= least else rules[i + 1]
                return
        self.rule = rules[-1]

    def _may_have_modes(self, points: Referred) -> bool:
        """Tell whether log p is not concave in a local coordinate, given globals at some points."""
        line = PathRule(WIDE, 1).nodes
        with np.errstate(all="ignore"):
            for near in (points[np.arange(i, i + 1)] for i in range(len(points.g))):
                slopes = np.diff(self.terms.terms(near.g, near.centres.at(line))[1][0], axis=0) / np.diff(line, axis=0)
                if (np.diff(slopes, axis=0) > _ROUNDING * np.abs(slopes[1:])).any():
                    return True
        return False

    def learn_base(self, points: Referred, weights: Array, *, tolerance: float, least: int, reach: float) -> None:
        """Look for a rule of fewer nodes whose log m differs from the reference's by a polynomial."""
        whitening = self.whitening
        assert whitening is not None
        self.base = None
        usable = np.isfinite(points.log_marginal) & ~points.lost
        weights = np.where(usable, weights, 0.0)
        weights = weights / weights.sum()
        centres = self.predicted(points.g)
        for rule in bases(self.forest.n_levels):
            if rule.n_nodes < least or rule.n_nodes >= self.rule.n_nodes:
                continue
            cheap = integrate(self.terms, self.forest, rule, points.g, centres, moments=False).log_marginal
            difference = points.log_marginal - cheap
            good = usable & np.isfinite(difference)
            if good.mean() < 0.95:
                continue
            known = points[np.flatnonzero(good)]
            base = BaseRule.fitted(rule, whitening, known.g, difference[good], weights[good], tolerance, reach)
            if base is None:
                continue
            # Where a rule is right, centres are as predicted; of many blocks, even one node takes long.
            if least <= 0 and self.forest.n_local >= _MANY:
                none = PathRule(0, self.forest.n_levels)
                most = _OF_TOLERANCE * tolerance
                values = known.log_marginal
                base = BaseRule.fitted(none, whitening, known.g, values, weights[good], most, reach) or base
            self.base = base
            return

    # --- by the base rule ---

    def __call__(self, g: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return log m(g) by the cheapest rule that will do, and which draws are lost."""
        return self.with_care(g, np.zeros(len(g), dtype=bool))

    def with_care(self, g: Array, far: NDArray[np.bool_]) -> tuple[Array, NDArray[np.bool_]]:
        """Return the same, by the reference where ``far`` says so: one node does not know that it is off its centre."""
        if self.base is None or self.whitening is None:
            points = self.reference(g)
            return points.log_marginal, points.lost
        log_marginal, off = self.by_base(g)
        off |= far
        off |= self.base.is_beyond(self.whitening.features(g))
        lost = np.zeros(len(g), dtype=bool)
        if len(again := np.flatnonzero(off)):
            points = self.reference(g[again])
            log_marginal[again], lost[again] = points.log_marginal, points.lost
        return np.where(np.isfinite(log_marginal), log_marginal, -np.inf), lost

    def by_base(self, g: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return log m(g) by the base rule, and which draws have nodes about wrong centres, as far as it can say."""
        assert self.base is not None
        assert self.whitening is not None
        rule, n = self.base.rule, len(g)
        log_marginal, off = np.zeros(n), np.zeros(n, dtype=bool)
        polynomial: Array = self.whitening.features(g) @ self.base.coefficients
        if not rule.n_nodes:
            return polynomial, off
        size = max(1, AT_ONCE // (self.forest.n_local * self.forest.n_levels))
        for start in range(0, n, size):
            rows = slice(start, start + size)
            centres = self.predicted(g[rows])
            log_marginal[rows], off[rows] = by_rule(self.terms, self.forest, rule, g[rows], centres, _SLACK)
        if rule.n_nodes > 1:
            off |= ~np.isfinite(log_marginal)
        return log_marginal + polynomial, off

    def is_right_at(self, points: Referred, tolerance: float) -> bool:
        """Tell whether the base rule is near to the reference, in root mean square, at points that it was told of."""
        if self.base is None:
            return False
        apart = points.log_marginal - self.by_base(points.g)[0]
        return bool(np.sqrt(np.mean(apart**2)) < tolerance)
