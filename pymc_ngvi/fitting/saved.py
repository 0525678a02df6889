"""A fit that was saved, and goes on when it is asked to."""

import numpy as np

from rich.theme import Theme

from pymc_ngvi.core.types import VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.outcome import Outcome
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.fitting.snapshot import Snapshot

#: Relative change of log p at the mean of q that is no rounding error.
_LOGP_RTOL = 1e-6


class SavedFit:
    """A fit that was saved: made again when it is to go on."""

    def __init__(self, density: ModelDensity, q: VariationalState, snapshot: Snapshot, log_p: float | None) -> None:
        self._density, self._q, self._snapshot, self.log_p = density, q, snapshot, log_p
        self._session: FitSession | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the fit has not gone on yet."""
        return self._session is None

    @property
    def options(self) -> FitOptions:
        """Of the fit."""
        return self.snapshot().options

    def outcome(self) -> Outcome | None:
        """Return what the fit has come to since; None where it has not gone on yet."""
        return None if self._session is None else self._session.outcome()

    @property
    def undone(self) -> tuple[str, ...]:
        """What a fit that was interrupted has left out since."""
        return () if self._session is None else self._session.undone

    def snapshot(self) -> Snapshot:
        """Return what the fit needs to go on in another process."""
        return self._snapshot if self._session is None else self._session.snapshot()

    def refine(
        self,
        n: int,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> Outcome:
        """Go on; see `NGVIApproximation.refine`."""
        if self._session is None:
            self._check_log_p()
            self._session = FitSession.resumed(self._density, self._snapshot)
        return self._session.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws)

    def _check_log_p(self) -> None:
        if self.log_p is None:
            return
        now = float(self._density.logp(np.asarray(self._q.mean())[None])[0])
        if not np.isclose(now, self.log_p, rtol=_LOGP_RTOL, atol=_LOGP_RTOL, equal_nan=True):
            raise ValueError(
                f"The fit can't go on: at the mean of q, log p of this model is {now:.8g}, and that of the model which "
                f"was fitted {self.log_p:.8g}. The priors, or data that are no pm.Data, differ: fit again."
            )
