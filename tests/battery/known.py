"""What is known of a posterior, with its own errors, and whether draws agree with it."""

from dataclasses import dataclass, fields

import arviz_stats
import numpy as np

from scipy.stats import norm

#: Combined standard errors, and standard deviations beside them, that an outcome may be off by.
N_ERRORS, SLACK = 5.0, 0.03
#: Kurtosis from which on draws tell neither a mean nor a standard deviation: their limits do.
HEAVY = 30.0
#: Ends of a central interval of 90 %.
LIMITS = (0.05, 0.95)
#: Elements of a variable that are compared, spread over it.
MOST = 12
#: The sum of effects that sum to zero has a standard deviation, which says nothing: a share of the largest one.
_ROUNDING = 1e-10
_NO_PAIRS = np.empty((0, 2), dtype=int)


@dataclass(frozen=True)
class Known:
    """Moments and limits of k quantities, and effective sizes of what they were made of; infinite where they are exact.

    The last quantities are sums and differences of pairs of the first, each in its standard deviations: they are off
    where a correlation is. ``limits`` are the probabilities of ``low`` and ``high``, NaN where limits are not known.
    """

    names: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray
    kurtosis: np.ndarray
    size: np.ndarray
    size_of_sd: np.ndarray
    size_of_limits: np.ndarray
    limits: np.ndarray
    pairs: np.ndarray
    #: Log marginal likelihood and its standard error, NaN where they are not known.
    evidence: np.ndarray

    @classmethod
    def of_draws(cls, draws, names, pairs, n_chains):
        """Summarise draws (n, k) of chains, one after the other; ``pairs`` of columns become sums and differences."""
        draws, names = _with_pairs(draws, names, pairs, draws.std(axis=0))
        mean, sd = draws.mean(axis=0), draws.std(axis=0)
        kurtosis = np.mean((draws - mean) ** 4, axis=0) / np.maximum(sd**4, np.finfo(float).tiny)
        low, high = np.quantile(draws, LIMITS, axis=0)
        chains = draws.reshape(n_chains, -1, len(names))
        parts = (chains, (chains - mean) ** 2, chains < low, chains > high)
        sizes = [[_size(part[:, :, i]) for i in range(len(names))] for part in parts]
        limits = np.tile(LIMITS, (len(names), 1)).T
        ends = np.minimum(sizes[2], sizes[3])
        return cls(
            names, mean, sd, low, high, kurtosis, *map(np.array, sizes[:2]), ends, limits, pairs, np.full(2, np.nan)
        )

    @classmethod
    def exactly(cls, names, mean, sd, low=None, high=None, size=np.inf, limits=LIMITS, evidence=(np.nan, np.nan)):
        """What is known without error, or of an effective size; NaN is not known. Kurtosis is that of a normal."""
        names, mean, sd = np.atleast_1d(names), np.atleast_1d(mean).astype(float), np.atleast_1d(sd).astype(float)
        sizes, ends = np.full(len(names), size), np.tile(limits, (len(names), 1)).T
        if low is None:
            low, high = ends = np.full((2, len(names)), np.nan)
        return cls(
            names, mean, sd, np.atleast_1d(low), np.atleast_1d(high), np.full(len(names), 3.0), *[sizes] * 3, ends,
            _NO_PAIRS, np.array(evidence),
        )  # fmt: skip

    @classmethod
    def from_store(cls, file, name):
        """Read what `to_store` gave."""
        return cls(**{field.name: file[f"{name}/{field.name}"] for field in fields(cls)})

    def to_store(self, name):
        """Return small arrays by name."""
        values = {f"{name}/{field.name}": getattr(self, field.name) for field in fields(self)}
        return {key: value.astype(np.float32) if _is_small(key, value) else value for key, value in values.items()}

    def wrong(self, draws, names, size):
        """Return sentences on what disagrees; ``size`` is the effective one of the draws (n, k) of named quantities."""
        where = {name: i for i, name in enumerate(names)}
        first = [where[name] for name in self.names[: len(self.names) - 2 * len(self.pairs)]]
        draws, _ = _with_pairs(draws[:, first], self.names, self.pairs, self.sd)
        if not np.isfinite(draws).all():
            return ["not all draws are finite"]
        mean, sd = draws.mean(axis=0), draws.std(axis=0)
        own = np.mean(((draws - mean) / np.where(sd > 0.0, sd, 1.0)) ** 4, axis=0)
        has_moments = (self.kurtosis <= HEAVY) & np.isfinite(self.mean)
        varies = self.sd > _ROUNDING * self.sd.max()
        of_mean = np.sqrt(1.0 / size + 1.0 / self.size)
        of_sd = np.sqrt((np.maximum(self.kurtosis, own) - 1.0) / 4.0 * (1.0 / size + 1.0 / self.size_of_sd))
        parts = [
            ("mean", (mean - self.mean) / self.sd, of_mean, has_moments, 1.0),
            ("sd", sd / self.sd - 1.0, of_sd, has_moments, 1.0),
        ]
        shares = np.mean(draws < self.low, axis=0), np.mean(draws > self.high, axis=0)
        for part, share, p in zip(("below", "above"), shares, (self.limits[0], 1.0 - self.limits[1]), strict=True):
            error = np.sqrt(p * (1.0 - p) * (1.0 / size + 1.0 / self.size_of_limits))
            density = norm.pdf(norm.ppf(np.nanmax(p, initial=0.0)))  # of a normal at its limit, in its sd
            parts.append((f"share {part} the limit", share - p, error, np.isfinite(p), density))
        return [
            f"{self.names[i]}: {what} off by {error[i] / unit:+.3f} sd, allowed {N_ERRORS * se[i] / unit + SLACK:.3f}"
            for what, error, se, known, unit in parts
            for i in np.flatnonzero(varies & known & ~(np.abs(error) <= N_ERRORS * se + SLACK * unit))
        ]

    def wrong_evidence(self, value, error):
        """Return a sentence if a log marginal likelihood with a standard error disagrees."""
        known, of_known = self.evidence
        allowed = N_ERRORS * np.hypot(error, of_known) + SLACK
        if np.isnan(known) or abs(value - known) <= allowed:
            return []
        return [f"log marginal likelihood {value:.3f} +- {error:.3f}, should be {known:.3f}, allowed {allowed:.3f}"]


def quantities(posterior, model):
    """Return draws (n, k) of what is compared, their names, and pairs: of all variables of a model that are not data.

    Of a vector, some elements and the total; pairs are its first and last element, and first elements of neighbours.
    """
    columns, names, pairs, first = [], [], [], None
    for variable in (*model.free_RVs, *model.deterministics):
        if variable.name not in posterior:
            continue
        values = posterior[variable.name].to_numpy()
        values = values.reshape(values.shape[0] * values.shape[1], -1).astype(float)
        n = values.shape[1]
        if n == 0:
            continue
        picked = np.unique(np.linspace(0, n - 1, min(n, MOST)).astype(int))
        at = len(names)
        columns += [values[:, picked]] + ([values.sum(axis=1, keepdims=True)] if n > 1 else [])
        names += [f"{variable.name}[{i}]" for i in picked] + ([f"total of {variable.name}"] if n > 1 else [])
        pairs += [(at, at + len(picked) - 1)] * (n > 1) + [(first, at)] * (first is not None)
        first = at
    return np.concatenate(columns, axis=1), np.array(names), np.array(pairs, dtype=int).reshape(-1, 2)


def varying(draws, names, pairs):
    """Leave out what is constant, as the diagonal of a correlation matrix is."""
    varies = draws.std(axis=0) > 1e-6 * (np.abs(draws).mean(axis=0) + np.finfo(np.float32).tiny)
    number = np.cumsum(varies) - 1
    kept = varies[pairs].all(axis=1) if len(pairs) else np.zeros(0, dtype=bool)
    return draws[:, varies], names[varies], number[pairs[kept]]


def _with_pairs(draws, names, pairs, sd):
    if not len(pairs):
        return draws, np.asarray(names)
    one, other = (draws[:, pairs[:, i]] / sd[pairs[:, i]] for i in range(2))
    made = [f"{names[i]} {sign} {names[j]}" for sign in "+-" for i, j in pairs]
    return np.concatenate([draws, one + other, one - other], axis=1), np.array([*names, *made])


def _size(chains):
    size = float(arviz_stats.ess(chains.astype(float), method="mean"))
    return size if np.isfinite(size) else float(chains.size)


def _is_small(key, value):
    """Whether a float32 holds it: limits are compared with draws, and need no more."""
    return value.dtype == float and not key.endswith(("limits", "evidence"))
