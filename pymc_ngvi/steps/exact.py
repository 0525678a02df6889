"""What step rules share that go by an ELBO without noise: the prior, and rows or batches, by quadrature."""

from typing import Any, ClassVar, cast

from pymc_ngvi.core.types import Direction, Estimator, GaussianState, RuleState, StepRule, Target, Update
from pymc_ngvi.estimators import Quadrature
from pymc_ngvi.steps.schedule.state import TOL, Tolerance


class ExactRule[T, S: RuleState](StepRule[GaussianState, S]):
    """A step rule on an ELBO without noise; on a target T; see `StepRule` for the parameters.

    Raises
    ------
    TypeError
        For an estimator with noise.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    takes_any_start = True

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        direction: Direction | None = None,
        seed: int,
        tol: float = TOL,
        stl: bool = True,
    ) -> None:
        if not isinstance(estimator, Quadrature):
            raise TypeError("this step rule needs an ELBO without noise: take estimator='quadrature'")
        self._target: T = cast(Any, target)
        self._update, self._estimator = update, estimator
        self._tolerance, self._seed = Tolerance(tol), seed
