"""What an approximation knows of its fit: the record of it, and how to go on."""

from typing import Any

from rich.theme import Theme

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.fitting.outcome import Outcome, report_outcome
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.methods.moments import Marginals


class FitReport(Marginals):
    """The part of an approximation that reports on its fit, from ``record``."""

    record: FitRecord | None
    _session: Any
    set_state: Any
    _exact_step: Any
    _gaussian: Any

    def take(self, gaussian: Any, step: Any, record: FitRecord) -> None:
        """Take over what a Gaussian fit has to say, after an exact step.

        Parameters
        ----------
        gaussian : NGVIApproximation
        step : ExactStep
            Is done again when the fit goes on.
        record : FitRecord
        """
        self._gaussian, self._exact_step, self.record = gaussian, step, record
        self.hist, self.gap_hist = gaussian.hist, gaussian.gap_hist
        self._data = gaussian._data

    def _follow(self, outcome: Outcome) -> None:
        """Take over what a fit has come to."""
        self.set_state(outcome.q)
        self.record, self.hist, self.gap_hist = outcome.record, outcome.hist, outcome.gap_hist

    @property
    def gaussian(self) -> Any:
        """The Gaussian fit: what an exact posterior began from; this object itself where it is none."""
        return self if self._gaussian is None else self._gaussian

    def _fitted(self, what: str) -> FitRecord:
        if self.record is None:
            raise RuntimeError(
                f"{what} is known after a fit only, and this approximation was not made by one. "
                "Use pm.fit(method='ngvi')."
            )
        return self.record

    def _judged(self) -> Any:
        """Return the diagnosis that belongs to q, if it was made; subclasses make them."""
        raise NotImplementedError

    def _keep(self, diagnosis: Any, share: tuple[float, float]) -> None:
        """Take a diagnosis as that which belongs to q."""
        raise NotImplementedError

    def refuse_changed_data(self, why: str) -> None:
        """Raise ValueError if ``pm.set_data`` changed the data since the fit."""
        self._posterior.refuse_changed_data(why)

    @property
    def elbo(self) -> Elbo:
        """Evidence lower bound in nats, on draws that had no part in the fit: ``value`` and ``se``."""
        return self._fitted("elbo").elbo

    @property
    def gap(self) -> float:
        """Nats of ELBO still to be gained within the family, estimated on fresh draws."""
        return self._fitted("gap").gap

    @property
    def status(self) -> Status:
        """How the fit ended; ``status.sentence`` and ``status.cure`` say more."""
        return self._fitted("status").status

    @property
    def converged(self) -> bool:
        """Whether the fit stopped because it had converged."""
        return self._fitted("converged").converged

    @property
    def n_iterations(self) -> int:
        """Iterations of the fit."""
        return self._fitted("n_iterations").n_iterations

    @property
    def n_gradients(self) -> int:
        """Draws at which the gradient of log p was evaluated."""
        return self._fitted("n_gradients").n_gradients

    @property
    def n_hessians(self) -> int:
        """Draws at which the Hessian of log p was evaluated."""
        return self._fitted("n_hessians").n_hessians

    @property
    def compile_seconds(self) -> float:
        """Wall-clock time that building and compiling graphs took."""
        return self._fitted("compile_seconds").compile_seconds

    @property
    def run_seconds(self) -> float:
        """Wall-clock time of the rest of the fit."""
        return self._fitted("run_seconds").run_seconds

    @property
    def backend(self) -> str:
        """What evaluated the log density: "quick", "numba", "c" or "jax"."""
        return self._fitted("backend").backend

    def refine(
        self,
        n: int = 10_000,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> Any:
        """Go on with the fit for at most ``n`` iterations, in place, as if it had not stopped.

        Parameters
        ----------
        n : int, default 10_000
        progressbar : bool, default True
        progressbar_theme : rich.theme.Theme, optional
        tol, max_draws : optional
            New values of these options; a fit that has converged goes on only with a smaller ``tol``.

        Returns
        -------
        NGVIApproximation
            This object.

        Raises
        ------
        RuntimeError
            If the approximation was made without a fit, or saved without it.
        ValueError
            For an option that makes no sense; where ``pm.set_data`` changed the data after the fit.
        """
        session = self.gaussian._session
        if session is None:
            raise RuntimeError(
                "There is no fit to go on with: this approximation was made without one, or saved without it. "
                "Use pm.fit(method='ngvi', start=...)."
            )
        gaussian = self.gaussian
        gaussian.refuse_changed_data("The fit can't go on with other data")
        gaussian._follow(session.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws))
        approx = self if self._exact_step is None else self._exact_step.again(self)
        report_outcome(gaussian._state, approx._fitted("refine"))
        return approx
