"""Pareto-smoothed importance weights [1]_, and what they correct set against their own Monte Carlo error.

References
----------
.. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
   https://doi.org/10.48550/arXiv.1507.02646
"""

import functools
import math

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, WeightVerdict, khat_limit, weigh
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.corrections.weighted_moments import MomentSums

#: Part of the draws that weights are worth which leave nothing to correct, whatever the shape of their tail.
_NOTHING_TO_CORRECT = 0.99
#: More draws than these are not proposed to anybody.
_MOST_DRAWS = 1_000_000


@dataclass(frozen=True, eq=False)
class ImportanceWeights:
    """Weights p/q of draws of q, their tail smoothed.

    Parameters
    ----------
    log_weights : ndarray, shape (n_draws,)
        Normalised: their exponentials sum to 1. -inf where p is 0.
    khat : float
        Pareto k-hat of the weights, as `pymc_ngvi.core.psis.pareto_khat` has it.
    verdict : WeightVerdict, optional
        What they say of q; without it, k-hat decides.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.results.corrections.importance import ImportanceWeights
    >>> x = 1.2 * np.random.default_rng(1).normal(size=10_000)
    >>> w = ImportanceWeights.of(log_p=-0.5 * x**2, log_q=-0.5 * (x / 1.2) ** 2)
    >>> round(float(w.weights @ x**2), 2), round(w.effective_sample_size, -2)
    (1.0, 9500.0)
    """

    log_weights: Array
    khat: float
    verdict: WeightVerdict | None = None

    @classmethod
    def of(cls, log_p: Array, log_q: Array) -> "ImportanceWeights":
        """Smooth the weights of draws.

        Parameters
        ----------
        log_p, log_q : ndarray, shape (n_draws,)
            Log densities at the same draws of q, on the unconstrained scale; constants do not matter. Draws whose
            ``log_p`` is -inf or NaN get no weight.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where log p is finite at none of them, or infinite at one.
        """
        if len(log_p) < MIN_KHAT_DRAWS:
            raise ValueError(f"Importance weights need at least {MIN_KHAT_DRAWS} draws; got {len(log_p)}.")
        ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
        finite = np.isfinite(ratio)
        if np.any(ratio == np.inf) or not finite.any():
            what = "infinite at some" if finite.any() else "finite at none"
            raise ValueError(f"log p is {what} of {len(ratio):,} draws of q: weights p/q can't correct it.")
        log_weights, found = weigh(log_p, log_q)
        return cls(log_weights, found.khat, found.verdict())

    @functools.cached_property
    def weights(self) -> Array:
        """The weights, (n_draws,); they sum to 1."""
        return np.exp(self.log_weights)

    @property
    def n_draws(self) -> int:
        """Number of draws."""
        return len(self.log_weights)

    @property
    def effective_sample_size(self) -> float:
        """Draws of the posterior that would do as well, about: 1 / sum of squared weights."""
        return float(1.0 / np.sum(self.weights**2))

    def check(self, per_draw: int = 1) -> None:
        """Raise ValueError where k-hat says that weights can't help.

        Parameters
        ----------
        per_draw : int, default 1
            Draws of q for each draw that the user asked for.
        """
        limit = khat_limit(self.n_draws)
        helps = self.khat <= limit if self.verdict is None else self.verdict.helps
        if helps or self.effective_sample_size > _NOTHING_TO_CORRECT * self.n_draws:
            return
        more = ""
        if self.khat < khat_limit(_MOST_DRAWS):
            needed = math.ceil(10.0 ** (1.0 / (1.0 - self.khat)) / per_draw)
            more = f"Take {_rounded(max(needed, 2_000))} draws or more, if it stays so; or "
        advice = f"{more}fit a richer family (family='mixture', 'student_t'), reparametrise, or use pm.sample."
        raise ValueError(
            f"Pareto k-hat is {self.khat:.2f}, and {self.n_draws:,} draws of q allow for {limit:.2f} at most: "
            f"importance weights can't correct what q misses. {advice[0].upper()}{advice[1:]} "
            "Without importance weights, q is drawn from as it is."
        )


@dataclass(frozen=True)
class Correction:
    """What weights change, against the error that they bring.

    Both are root mean squares over means and standard deviations of all unconstrained coordinates, in posterior
    standard deviations.

    Parameters
    ----------
    size : float
        Of the correction, its own noise taken out; 0 where it is not told from noise.
    error : float
        Monte Carlo error of the corrected moments.
    khat, effective_sample_size : float
        Of the weights.
    n_draws : int
        Of q.
    """

    size: float
    error: float
    khat: float
    effective_sample_size: float
    n_draws: int

    @classmethod
    def of(cls, weights: ImportanceWeights, sums: MomentSums) -> "Correction":
        """Judge by the moments of the unconstrained coordinates."""
        found = sums.result()
        scale = found.sd.corrected
        pairs = (found.mean, found.sd)
        with np.errstate(all="ignore"):
            square = np.mean([(m.change**2 - m.change_se**2) / scale**2 for m in pairs])
            error = np.mean([(m.se / scale) ** 2 for m in pairs])
        size = math.sqrt(max(float(square), 0.0))
        return cls(size, math.sqrt(float(error)), weights.khat, weights.effective_sample_size, weights.n_draws)

    @property
    def helps(self) -> bool:
        """Whether the weights correct more than their error is."""
        return self.size > self.error

    def attrs(self) -> dict[str, float | str]:
        """Return the figures as attributes of a Dataset."""
        return {
            "khat": self.khat,
            "effective_sample_size": self.effective_sample_size,
            "correction_size": self.size,
            "correction_error": self.error,
            "correction": self.sentence(),
        }

    def sentence(self, per_draw: int = 1) -> str:
        """Say what the weights change and with what error; ``per_draw``: draws of q for one that is asked for."""
        figures = (
            f"Importance weights change means and standard deviations by {self.size:.3f} posterior standard deviations "
            f"(root mean square), with a Monte Carlo error of {self.error:.3f} (effective sample size "
            f"{self.effective_sample_size:,.0f} of {self.n_draws:,} draws of q)"
        )
        if self.helps:
            return figures + "."
        if self.size == 0.0:
            return f"{figures}: they do not help. There is nothing to correct that so many draws could show."
        needed = 1.2 * self.n_draws * (self.error / self.size) ** 2 / per_draw
        cure = f"Take {_rounded(needed)} draws, or none of it" if needed < _MOST_DRAWS else "Leave it out"
        return f"{figures}: they do not help. {cure}: the moments of q itself are nearer."


def _rounded(count: float) -> str:
    """Return a count, rounded up to two digits."""
    unit = 10 ** max(math.floor(math.log10(count)) - 1, 0)
    return f"{math.ceil(count / unit) * unit:,}"
