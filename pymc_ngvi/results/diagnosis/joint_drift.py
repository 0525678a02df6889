"""How far log p drifts as draws are moved: of most draws, and of a minority that is far from the posterior.

Along trajectories that leave the posterior as it is, log p of its draws rises as often as it falls, and as far,
whatever its tails are. Of a Gaussian posterior in d dimensions, log p is a constant less half of a chi-square: its
standard deviation is sqrt(d / 2), that of a change sqrt(d). A mean of changes is no test where a few of them are huge:
these make its standard error as large. So most draws are judged by a trimmed mean, and the others are counted.
"""

from dataclasses import dataclass

import numpy as np

from scipy.stats import binom, chi2

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.moment_drift import FAMILY_WISE
from pymc_ngvi.results.diagnosis.moves import Moved

#: Part of the changes that a trimmed mean leaves out at either end.
_TRIMMED = 0.2
#: Probability that a draw of a Gaussian posterior lies so far below the median of log p as counts as far.
_RARE = 1e-4
#: Part of the draws that have to be far, beyond those that go the other way, to count; and draws that are worth moving
#: others for, where they are too few to be certain.
_LEAST_FAR, _SUSPICIOUS = 0.02, 2
#: Drift of most draws that counts, in standard deviations of log p, and standard errors that it has to exceed.
_MUCH, _CERTAIN = 0.5, 3.0


@dataclass(frozen=True)
class JointDrift:
    """Changes of log p as draws are moved."""

    #: Their trimmed mean, in nats, with its standard error.
    location: Elbo
    #: Nats about that, beyond which a change counts as far: what one draw of a Gaussian posterior in 10,000 is below
    #: the median of log p.
    far: float
    #: Changes that are far above it; shape (n_rises,).
    rises: Array
    #: Changes that are far below it, and all of them.
    n_falls: int
    n_draws: int
    n_dim: int

    def is_much(self, drift: Elbo) -> bool:
        """Tell whether a drift counts: by the standard deviation of log p, and by its own error."""
        return bool(abs(drift.value) > max(_MUCH * np.sqrt(0.5 * self.n_dim), _CERTAIN * drift.se))

    @property
    def _excess(self) -> int:
        return len(self.rises) - self.n_falls

    @property
    def has_minority(self) -> bool:
        """Whether log p rises far at a part of the draws that counts, more often than it would fall by chance."""
        n = len(self.rises) + self.n_falls
        return self._excess > _LEAST_FAR * self.n_draws and float(binom.sf(len(self.rises) - 1, n, 0.5)) < FAMILY_WISE

    @property
    def is_suspicious(self) -> bool:
        """Whether more draws may show a minority that these are too few to be certain of."""
        return not self.has_minority and self._excess >= max(_SUSPICIOUS, 0.5 * _LEAST_FAR * self.n_draws)

    def in_words(self) -> str:
        """Return what was measured."""
        return (
            f"log p of most draws drifts by {self.location} nats; it rises by more than {self.far:.0f} at "
            f"{len(self.rises):,}, and falls as far at {self.n_falls:,} of {self.n_draws:,}"
        )

    def with_others(self, other: "JointDrift") -> "JointDrift":
        """Return what two sets of moved draws show together."""
        n = self.n_draws + other.n_draws
        mine, others = self.n_draws / n, other.n_draws / n
        value = mine * self.location.value + others * other.location.value
        se = float(np.hypot(mine * self.location.se, others * other.location.se))
        return JointDrift(
            location=Elbo(value, se),
            far=self.far,
            rises=np.concatenate([self.rises, other.rises]),
            n_falls=self.n_falls + other.n_falls,
            n_draws=n,
            n_dim=self.n_dim,
        )


def joint_drift_of(moved: Moved) -> JointDrift:
    """Return the changes of log p of moved draws."""
    change, n_dim = moved.log_p_end - moved.log_p_start, moved.start.shape[1]
    location = trimmed_mean(change)
    far = 0.5 * float(chi2.isf(_RARE, n_dim) - chi2.median(n_dim))
    apart = change - location.value
    return JointDrift(location, far, change[apart > far], int(np.sum(apart < -far)), len(change), n_dim)


def trimmed_mean(values: Array) -> Elbo:
    """Return the mean without the fifths at both ends, with its standard error, by the winsorised variance.

    References
    ----------
    .. [1] K. K. Yuen (1974). The two-sample trimmed t for unequal population variances. Biometrika 61.
       https://doi.org/10.1093/biomet/61.1.165
    """
    ordered, n = np.sort(values), len(values)
    cut = int(_TRIMMED * n)
    kept = ordered[cut : n - cut]
    if len(kept) < 2:
        return Elbo(float(np.mean(values)) if n else np.nan, np.inf)
    winsorised = np.clip(ordered, kept[0], kept[-1])
    return Elbo(float(kept.mean()), float(winsorised.std(ddof=1) / ((1.0 - 2.0 * cut / n) * np.sqrt(n))))
