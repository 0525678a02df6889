"""What an approximation knows of its fit: the record of it, and how to go on."""

from concurrent.futures import Executor
from typing import Self

from rich.theme import Theme

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.density.shards.density import ShardedDensity
from pymc_ngvi.fitting.errors import SoFar
from pymc_ngvi.fitting.options import check_n
from pymc_ngvi.fitting.outcome import report_outcome
from pymc_ngvi.results.fitted import Fitted


class FitMethods(Fitted):
    """The outcome of the fit, from ``record``, and how to go on."""

    @property
    def elbo(self) -> Elbo:
        """Evidence lower bound in nats, on draws that had no part in the fit or by quadrature: ``value`` and ``se``."""
        return self._record_of("elbo").elbo

    @property
    def gap(self) -> float:
        """Nats of ELBO still to be gained within the family, estimated on fresh draws or by quadrature."""
        return self._record_of("gap").gap

    @property
    def status(self) -> Status:
        """How the fit ended; ``status.sentence`` and ``status.cure`` say more."""
        return self._record_of("status").status

    @property
    def converged(self) -> bool:
        """Whether the fit stopped because it had converged."""
        return self._record_of("converged").converged

    @property
    def n_iterations(self) -> int:
        """Iterations of the fit."""
        return self._record_of("n_iterations").n_iterations

    @property
    def n_gradients(self) -> int:
        """Draws at which the gradient of log p was evaluated; without draws, its expectations."""
        return self._record_of("n_gradients").n_gradients

    @property
    def n_hessians(self) -> int:
        """Draws at which the Hessian of log p was evaluated; without draws, its expectations."""
        return self._record_of("n_hessians").n_hessians

    @property
    def compile_seconds(self) -> float:
        """Wall-clock time that building and compiling graphs took."""
        return self._record_of("compile_seconds").compile_seconds

    @property
    def run_seconds(self) -> float:
        """Wall-clock time of the rest of the fit."""
        return self._record_of("run_seconds").run_seconds

    @property
    def backend(self) -> str:
        """What evaluated the log density: "quick", "numba", "c" or "jax"."""
        return self._record_of("backend").backend

    def refine(
        self,
        n: int = 10_000,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
        executor: Executor | object | None = None,
    ) -> Self:
        """Go on with the fit for at most ``n`` iterations, in place, as if it had not stopped.

        Parameters
        ----------
        n : int, default 10_000
        progressbar : bool, default True
        progressbar_theme : rich.theme.Theme, optional
        tol, max_draws : optional
            New values of these options; a fit that has converged goes on only with a smaller ``tol``.

        executor : concurrent.futures.Executor or distributed.Client, optional
            Where shards are evaluated from now on; see `Shards`.

        Returns
        -------
        NGVIApproximation
            This object.

        Raises
        ------
        RuntimeError
            If the approximation was made without a fit, or saved without it.
        ValueError
            For an option that makes no sense, or an executor where there are no shards; where ``pm.set_data`` changed
            the data after the fit.
        """
        if self._next_step is not None and self._record_of("refine").comes_first:
            return self._further(n, tol, max_draws, executor)
        gaussian = self.gaussian
        if gaussian._session is None:
            raise RuntimeError(
                "There is no fit to go on with: this approximation was made without one, or saved without it. "
                "Use pm.fit(method='ngvi', start=...)."
            )
        gaussian.refuse_changed_data("The fit can't go on with other data")
        if executor is not None:
            if not isinstance(gaussian.density, ShardedDensity):
                raise ValueError("The model has no shards: leave executor out.")
            gaussian.density.shards.use(executor)
        session, is_followed = gaussian._session, self._next_step is not None
        anew = ("the posterior anew, after these iterations",) if is_followed else ()

        def now() -> tuple[Self, tuple[str, ...]]:
            if (reached := session.outcome()) is not None:
                gaussian._follow(reached)
            return self, (*session.undone, *anew)

        with SoFar[Self]() as so_far:
            so_far.is_now(now)
            gaussian._follow(session.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws))
            so_far.is_now(lambda: (self, anew))
            so_far.result = self if self._next_step is None else self._next_step.again(self)
        report_outcome(gaussian._state, so_far.result._record_of("refine"))
        return so_far.result

    def _further(self, n: int, tol: float | None, max_draws: int | None, executor: object) -> Self:
        """Go on with a nested posterior that no Gaussian fit came before."""
        if tol is not None or max_draws is not None or executor is not None:
            raise ValueError(
                "No Gaussian fit came before this nested posterior: refine() looks at more hyperparameters, and takes "
                "no tol, max_draws or executor. approx.gaussian.refine takes them."
            )
        self.refuse_changed_data("The posterior can't be gone on with for other data")
        with SoFar[Self]() as so_far:
            so_far.is_now(lambda: (self, ("more hyperparameters",)))
            step = self._next_step
            so_far.result = step.further(self) if check_n(n) and step is not None else self
        return so_far.result
