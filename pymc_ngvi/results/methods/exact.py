"""What an exact posterior tells beside its draws: the marginal likelihood, and groups left out."""

import logging

from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from pymc_ngvi.marginal.left_out import leave_groups_out
from pymc_ngvi.marginal.state import ExactState
from pymc_ngvi.marginal.verdict import Checks
from pymc_ngvi.model.normalised import unnormalised
from pymc_ngvi.results.methods.corrections import CorrectionReport

logger = logging.getLogger("pymc.ngvi")

#: k-hat above which the density of a group left out is not reliable.
_MOST_KHAT = 0.7


class LogMarginalLikelihood(NamedTuple):
    """The logarithm of p(y), the density of the data with all parameters integrated out.

    Parameters
    ----------
    value : float
        In nats.
    se : float
        Monte Carlo standard error, from independent sequences of draws.
    """

    value: float
    se: float

    def __str__(self) -> str:
        """Return ``-684.54 +- 0.01 (of the mode that was found)``."""
        return f"{self.value:,.2f} +- {self.se:.2g} (of the mode that was found)"


class ExactReport(CorrectionReport):
    """The part of an approximation that an exact posterior has more to say in."""

    @property
    def is_exact(self) -> bool:
        """Whether this is the posterior up to simulation error, rather than a Gaussian or another q."""
        return isinstance(self._state, ExactState)

    @property
    def checks(self) -> Checks | None:
        """What was measured of an exact posterior; None of any other."""
        state = self._state
        return state.checks if isinstance(state, ExactState) else None

    @property
    def log_marginal_likelihood(self) -> LogMarginalLikelihood:
        """The log marginal likelihood, log p(y), with its standard error, of an exact posterior.

        Where the posterior has several modes, it is that of the one that was found: with K equal modes by symmetry,
        log K more is that of all. Constants of the likelihood are included, as PyMC has them.

        Raises
        ------
        ValueError
            Where the posterior is not exact; where it means nothing: improper priors (``pm.Flat``), terms without a
            normalising constant (``pm.ICAR``, a Potential, unless `pymc_ngvi.normalised` says otherwise).

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     p = pm.Beta("p", 1.0, 1.0)
        ...     y = pm.Binomial("y", 4, p, observed=1)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> abs(approx.log_marginal_likelihood.value - -1.609) < 0.01  # 1/5: each number of successes is as likely
        True
        """
        state = self._exact("log_marginal_likelihood is that")
        if reasons := unnormalised(self.model):
            raise ValueError(f"The model has no marginal likelihood: {'; '.join(reasons)}.")
        return LogMarginalLikelihood(*state.log_normaliser())

    def leave_one_group_out(self) -> xr.Dataset:
        """Return the predictive density of each group's data given those of all other groups.

        Groups are the independent blocks of the model: of nested groups, the outermost.

        Returns
        -------
        xarray.Dataset
            Along ``group``, whose labels are those of the first effect of each: ``log_density``, and ``khat`` of the
            weights behind it. ``attrs`` has ``elpd``, their sum, with its standard error ``elpd_se``, and
            ``n_high_khat``, the number of groups with a k-hat above .7.

        Raises
        ------
        ValueError
            Where the posterior is not exact, or the model has no groups.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> y = np.random.default_rng(1).normal(size=(20, 3)) + np.arange(20)[:, None] / 10.0
        >>> with pm.Model():
        ...     mu, s = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        ...     a = pm.Normal("a", mu, s, shape=20)
        ...     _ = pm.Normal("y", a[:, None], 1.0, observed=y)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.leave_one_group_out().sizes["group"]
        20
        """
        left = leave_groups_out(self._exact("leave_one_group_out() goes with"))
        labels = [self.layout.label(int(i)) for i in left.roots]
        n = len(labels)
        high = int((left.khat > _MOST_KHAT).sum())
        if high:
            logger.info(f"{high:,} of {n:,} groups have a k-hat above {_MOST_KHAT}: fit again without them.")
        spread = float(np.std(left.log_density, ddof=1)) if n > 1 else float("nan")
        attrs: dict[str, Any] = {
            "elpd": float(left.log_density.sum()),
            "elpd_se": spread * float(np.sqrt(n)),
            "n_high_khat": high,
        }
        values = {"log_density": ("group", left.log_density), "khat": ("group", left.khat)}
        return xr.Dataset(values, coords={"group": labels}, attrs=attrs)

    def _exact(self, what: str) -> ExactState:
        state = self._state
        if not isinstance(state, ExactState):
            why = "" if self.record is None or not self.record.posterior else f" ({self.record.posterior})"
            raise ValueError(f"{what} of an exact posterior, and this is none{why}: pm.fit(..., posterior='exact').")
        return state
