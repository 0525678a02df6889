"""Trials of a line search: expectations by rules of quadrature that follow a state."""

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from pymc_ngvi.core.types import BaseDraws, Density, GaussianState, RowRules, VariationalState
from pymc_ngvi.estimators.quadrature import ExactEvaluation, Quadrature

#: Nats between two ELBOs beyond which it does not matter that they are by different rules of quadrature.
_CLOSE = 0.05
#: Relative rounding of an ELBO.
ROUNDING = 1e-12


class Start(Protocol):
    """Where a search starts."""

    @property
    def q(self) -> GaussianState:
        """The state."""

    @property
    def elbo(self) -> float:
        """Its ELBO, nats."""

    @property
    def rules(self) -> RowRules | None:
        """By which that was taken; None for those that each trial needs."""


class Trials:
    """Trials of one search, compared with the state where it starts by the same rules of quadrature, if it is close.

    Attributes
    ----------
    left_support : bool
        Whether rules that a trial needs found points where log p is not finite, and those of the start none.
    all_finite : bool
        Whether no trial had such points.
    """

    def __init__(self, by_rules: Callable[..., ExactEvaluation], start: Start) -> None:
        self._by_rules, self._q = by_rules, start.q
        self.rules, self.elbo = start.rules, start.elbo
        self.left_support, self.all_finite = False, True

    def evaluate(self, q: GaussianState) -> ExactEvaluation:
        """Evaluate a trial, and the start once more where that took other rules."""
        evaluation = self._by_rules(q, self.rules, adapt=True, least=self._least)
        self.all_finite &= bool(evaluation.finite.all())
        found, before = evaluation.expectation.rules, self.rules
        same = before is None or np.array_equal(found.level, before.level)
        if not self.accept(evaluation):  # whatever other rules say
            self.left_support |= not same and not evaluation.finite.all()
            return evaluation
        if not same and abs(evaluation.elbo - self.elbo) < _CLOSE:
            self.elbo = self._by_rules(self._q, found).elbo
        self.rules = found
        return evaluation

    def accept(self, evaluation: ExactEvaluation) -> bool:
        """Tell whether the ELBO does not fall."""
        return bool(np.isfinite(evaluation.elbo) and evaluation.elbo >= self._least)

    @property
    def _least(self) -> float:
        return self.elbo - ROUNDING * (1.0 + abs(self.elbo))


class Following(Quadrature):
    """Expectations by the rules of the one before, and by others where its rows are wider or narrower."""

    def __init__(self, rules: RowRules | None) -> None:
        self._rules = rules

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> ExactEvaluation:
        """Take the expectation of log p under a Gaussian."""
        evaluation = self.by_rules(target, cast(GaussianState, state), self._rules, adapt=True)
        self._rules = evaluation.expectation.rules
        return evaluation
