"""What all methods of an approximation work on: the model, q, and the fit that made it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pymc as pm

from pymc_ngvi.core.seeds import Seed, generator_of
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.fitting.outcome import Outcome
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.saved import SavedFit
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.posteriors.plan import Plan
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.distributions import distribution_of
from pymc_ngvi.results.posterior import Distribution, Posterior

NO_Q = (
    "An exact posterior is a weighted pool of draws and has no q: approx.gaussian has that of the Gaussian fit it "
    "began from, with its density and its parameters."
)


class StateHolder(Protocol):
    """The PyMC group of an approximation, as far as its methods go."""

    def current_state(self) -> VariationalState:
        """Return q."""

    def set_state(self, q: VariationalState) -> None:
        """Replace q."""


class NextStep(Protocol):
    """What comes after a Gaussian fit, and is done again when that goes on; or what came in the place of one."""

    def again[A: Fitted](self, approx: A) -> A:
        """Bring an approximation up to date."""

    def further[A: Fitted](self, approx: A) -> A:
        """Go on with what no Gaussian fit came before."""

    def gaussian_of[A: Fitted](self, approx: A) -> A:
        """Return the Gaussian fit that was not made."""


class Fitted:
    """The model, q, and the fit of an approximation: what its methods share.

    Methods are one mixin by subject (`pymc_ngvi.results.methods`), each on this class alone. The work is in functions
    of a `Posterior`.
    """

    density: ModelDensity
    model: pm.Model
    groups: Sequence[StateHolder]
    include_transformed: bool
    record: FitRecord | None
    hist: Array
    gap_hist: Array
    _rng: np.random.Generator
    _data: DataSnapshot
    _constrainer: Constrainer
    _session: FitSession | SavedFit | None
    _gaussian: Self | None
    _next_step: NextStep | None
    _reports: Kept
    _made: tuple[VariationalState, Distribution] | None = None
    #: The class of fits, from a model and its options: set where it is defined, which is above results.
    _inference: ClassVar[Callable[..., Any]]

    @property
    def q(self) -> VariationalState:
        """The current state of the approximation.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._next_step is not None:
            raise AttributeError(NO_Q)
        return self._state

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.density.layout

    @property
    def gaussian(self) -> Self:
        """The Gaussian fit: what an exact posterior began from; this object itself where it is none.

        Where a nested posterior came in the place of it, it is made when it is first asked for: that takes as long as
        ``pm.fit(method="ngvi", posterior="gaussian")``, and gives the same bits.

        Raises
        ------
        ValueError
            Where it is still to be made, and ``pm.set_data`` changed the data since.
        """
        if self._next_step is None:
            return self
        if self._gaussian is None:
            self._gaussian = self._next_step.gaussian_of(self)
        return self._gaussian

    @property
    def _begins_with(self) -> VariationalState:
        """What another fit begins from: q, or the Gaussian that belongs to an exact or a nested posterior."""
        if self._next_step is None or self._gaussian is not None:
            return self.gaussian.q
        return getattr(self._state, "gaussian")  # noqa: B009 (of pools alone)

    @property
    def plan(self) -> Plan | None:
        """Which posteriors there were to choose from, at which prices, and what became of each; `print` shows a table.

        None where there was nothing to choose: a method was named, or a Gaussian asked for.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.plan.taken.kind
        'gaussian'
        """
        return None if self.record is None else self.record.plan

    def generator(self, random_seed: Seed) -> np.random.Generator:
        """Return the random generator for a seed; the approximation's own, which goes on, for None."""
        return self._rng if random_seed is None else generator_of(random_seed)

    def _generator_of_fit(self, random_seed: Seed, stream: int) -> np.random.Generator:
        """Return the random generator for a seed; for None, one that belongs to the fit, by the number of a stream."""
        if random_seed is not None:
            return generator_of(random_seed)
        return np.random.default_rng([stream, 0 if self.record is None else self.record.seed])

    def refuse_changed_data(self, why: str) -> None:
        """Raise ValueError if ``pm.set_data`` changed the data since the fit."""
        self._posterior.refuse_changed_data(why)

    def set_state(self, q: VariationalState) -> None:
        """Replace q, a state of the same class; symbolic nodes and compiled functions follow.

        Raises
        ------
        ValueError
            If ``q`` is of another class.
        """
        self.groups[0].set_state(q)

    def become(self, q: VariationalState) -> None:
        """Replace q by one that a fit has come to, of another class where it went on with another family."""
        self.set_state(q)

    def take(self, gaussian: Self | None, step: NextStep, record: FitRecord) -> None:
        """Take over what a Gaussian fit has to say, after an exact step.

        Parameters
        ----------
        gaussian : NGVIApproximation or None
            None where there is none yet.
        step : PosteriorStep
            Is done again when the fit goes on.
        record : FitRecord
        """
        self._gaussian, self._next_step, self.record = gaussian, step, record
        if gaussian is not None:
            self.hist, self.gap_hist, self._data = gaussian.hist, gaussian.gap_hist, gaussian._data

    def _fits_of(self, density: LogDensity) -> Callable[[int], Posterior]:
        """Return what fits another log p, again and again as its data change, to the same kind of posterior."""
        kind = "gaussian" if self._next_step is None else getattr(self._state, "kind", "auto")
        inference = type(self)._inference(density.given, posterior=kind)
        inference.begin_with(density)

        def fitted(random_seed: int) -> Posterior:
            inference.configure(random_seed=random_seed)
            found: Fitted = inference.fit(progressbar=False)
            assert found.record is not None
            found.record.refuse_interrupted()
            return found._posterior

        return fitted

    def _follow(self, outcome: Outcome) -> None:
        """Take over what a fit has come to."""
        self.become(outcome.q)
        self.record, self.hist, self.gap_hist = outcome.record, outcome.hist, outcome.gap_hist

    @property
    def _state(self) -> VariationalState:
        return self.groups[0].current_state()

    @property
    def _distribution(self) -> Distribution:
        """What reports read of q: chosen once for each q."""
        q = self._state
        if self._made is None or self._made[0] is not q:
            self._made = q, distribution_of(q)
        return self._made[1]

    @property
    def _posterior(self) -> Posterior:
        return Posterior(
            self._distribution, self.density, self._constrainer, self.record, self.hist, self.gap_hist, self._data,
            self.include_transformed,
        )  # fmt: skip

    @property
    def _kept(self) -> Kept:
        """What was computed of this q."""
        return self._reports.follow(self._posterior)

    def _record_of(self, what: str) -> FitRecord:
        if self.record is None:
            raise RuntimeError(
                f"{what} is known after a fit only, and this approximation was not made by one. "
                "Use pm.fit(method='ngvi')."
            )
        return self.record
