"""What an approximation knows of its fit: the record of it, and how to go on."""

from typing import Any

from rich.theme import Theme

from pymc_ngvi.marginals import Marginals
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.status import Status


class FitReport(Marginals):
    """The part of an approximation that reports on its fit, from ``record``."""

    record: FitRecord | None
    _session: Any

    def _fitted(self, what: str) -> FitRecord:
        if self.record is None:
            raise RuntimeError(
                f"{what} is known after a fit only, and this approximation was not made by one. "
                "Use pm.fit(method='ngvi')."
            )
        return self.record

    def refuse_changed_data(self, why: str) -> None:
        """Raise ValueError if ``pm.set_data`` changed the data since the fit."""
        changed = self._data.changed()
        if changed:
            raise ValueError(
                f"The data {', '.join(map(repr, changed))} were changed after the fit. {why}: set the data back with "
                "pm.set_data, or fit again."
            )

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

    def _check_weights(self) -> None:
        """Raise ValueError where log p is not that of the posterior that q approximates."""
        if self.density.has_minibatch:
            raise ValueError(
                "The model reads pm.Minibatch data: importance weights would compare q with the posterior given one "
                "batch only. Build the model on all of the data to compare them there."
            )
        self.refuse_changed_data("The model's posterior is another one now than q approximates")

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
        if self._session is None:
            raise RuntimeError(
                "There is no fit to go on with: this approximation was made without one, or saved without it. "
                "Use pm.fit(method='ngvi', start=...)."
            )
        return self._session.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws)
