"""The part of an approximation that says whether it can be relied on."""

from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.diagnosis.drift import Drift, drift_of
from pymc_ngvi.diagnosis.elsewhere import Elsewhere, other_fit, other_modes
from pymc_ngvi.diagnosis.findings import Context, findings_of
from pymc_ngvi.diagnosis.moves import Moved, move
from pymc_ngvi.diagnosis.tails import Weights, coordinate_khats, weights_of
from pymc_ngvi.diagnostics import FitReport
from pymc_ngvi.export import check_draws
from pymc_ngvi.psis import MIN_KHAT_DRAWS
from pymc_ngvi.result import Elbo
from pymc_ngvi.types import Array

#: Draws that are moved, trajectories of each, and gradients of all, about: by default, and thorough.
_QUICK, _THOROUGH = (256, 4, 6_000), (512, 16, 40_000)
#: Coordinates that get a k-hat of their own, at most: each takes two milliseconds.
_MOST_KHATS = 200
#: Numbers in the draws that are moved, and in those behind k-hat; at least so many draws of each.
_MOVED_ELEMENTS, _WEIGHED_ELEMENTS = 2**20, 2**25
_FEWEST_MOVED, _FEWEST_WEIGHED = 48, 1_000
#: Moved draws below which nothing is said of their moments.
_LEAST_MOVED = 32


class DiagnosisReport(FitReport):
    """The part of an approximation that says whether it can be relied on."""

    def diagnose(self, *, thorough: bool = False, draws: int = 10_000, random_seed: Any = None) -> Diagnosis:
        """Return whether means and standard deviations of q can be relied on, why not, and what to do.

        Pareto k-hat sees tails, but not how much the bulk of q is off, nor a mode that q misses. So draws of q are
        also moved towards the posterior, by a few Hamiltonian trajectories: what their moments then change by, q is
        off by, at least.

        Parameters
        ----------
        thorough : bool, default False
            Move more draws for longer, look for other modes from dispersed points, and fit once more from a dispersed
            start.
        draws : int, default 10_000
            Behind k-hat and the effective sample size, at least 100; fewer are used above 3,300 dimensions.
        random_seed : int, Generator or None

        Returns
        -------
        Diagnosis
            ``reliable``, ``reasons``; ``print`` shows the report, ``to_dataset()`` has all figures by variable.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit; for a model that reads
            minibatches.

        Notes
        -----
        Cost: ``draws`` log densities and up to about 8,000 gradients; thorough, about 50,000 gradients more and another
        fit. The report says how many it took.

        References
        ----------
        .. [1] Yao, Vehtari, Simpson, Gelman (2018). Yes, but did it work? Evaluating variational inference. ICML.
           https://doi.org/10.48550/arXiv.1802.02538

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     v = pm.Normal("v", 0.0, 3.0)
        ...     x = pm.Normal("x", 0.0, pm.math.exp(v / 2), shape=4)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> diagnosis = approx.diagnose(random_seed=1)
        >>> diagnosis.reliable
        False
        >>> "`v`" in diagnosis.reasons[0]
        True
        """
        from pymc_ngvi.session import few_threads  # it imports what this belongs to

        draws = check_draws(draws)
        if draws < MIN_KHAT_DRAWS:
            raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
        self._check_weights()
        rng = self.generator(random_seed)
        before = self.density.n_gradients
        with few_threads(self.density):
            weights, elbo, khats, n_log_p = self._weighed(draws, rng)
            moved, drift = self._moved(rng, *(_THOROUGH if thorough else _QUICK))
            places = self._elsewhere(elbo.value, rng) if thorough else []
        gap = float("nan") if self.record is None else self.record.gap
        about = self.q.mean(), self.q.sd()
        found = findings_of(self._context(), gap, elbo.value, weights, moved, drift, places, about)
        return Diagnosis(
            findings=found,
            outcome="not made by a fit" if self.record is None else str(self.record.status),
            gap=gap,
            elbo=elbo,
            weights=weights,
            by_coordinate={**_columns(drift, self.layout.n_dim), "khat": khats},
            log_p_drift=Elbo(np.nan, np.nan) if drift is None else drift.log_p,
            acceptance=moved.acceptance,
            n_moved=len(moved.end),
            n_trajectories=moved.n_trajectories,
            thorough=thorough,
            n_gradients=self.density.n_gradients - before,
            n_log_p=n_log_p,
            layout=self.layout,
        )

    def _context(self) -> Context:
        structure, n_dim = self.structure, self.layout.n_dim
        name = type(self.q).__name__.removesuffix("State").lower()
        return Context(
            layout=self.layout,
            record=self.record,
            family={"studentt": "student_t"}.get(name, name) if self.record is None else self.record.family,
            has_groups=structure.n_blocks > 1 and 0 < structure.n_global < n_dim,
            has_hessian=self.density.has_hessian,
        )

    def _weighed(self, draws: int, rng: np.random.Generator) -> tuple[Weights, Elbo, Array, int]:
        """Return k-hat of all and of coordinates, and the ELBO."""
        q, n_dim = self.q, self.layout.n_dim
        draws = min(draws, max(_FEWEST_WEIGHED, _WEIGHED_ELEMENTS // max(n_dim, 1)))
        index = self._shown_first(_MOST_KHATS)
        mean, sd = q.mean()[index], q.sd()[index]
        log_p, log_q, kept = np.empty(draws), np.empty(draws), np.empty((draws, len(index)))
        done = 0
        for size in self._chunks(draws):
            theta, now = q.draws(self._base(size, rng)), slice(done, done + size)
            log_p[now], log_q[now] = self.log_p(theta), self.log_q(theta)
            kept[now] = (theta[:, index] - mean) / sd
            done += size
        with np.errstate(invalid="ignore"):
            log_ratio = log_p - log_q
        finite = np.isfinite(log_ratio)
        khats = np.full(n_dim, np.nan)
        if finite.sum() >= MIN_KHAT_DRAWS:
            khats[index] = coordinate_khats(log_ratio[finite], kept[finite])
        n = int(finite.sum())
        value = float(log_ratio[finite].mean()) if n else -np.inf
        se = float(log_ratio[finite].std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
        return weights_of(log_p, log_q), Elbo(value, se), khats, draws

    def _shown_first(self, n_most: int) -> NDArray[np.intp]:
        """Return the coordinates whose k-hats are computed: all, or global ones first."""
        n_dim = self.layout.n_dim
        if n_dim <= n_most:
            return np.arange(n_dim)
        border = self.structure.border
        return np.concatenate([border, np.setdiff1d(np.arange(n_dim), border)])[:n_most]

    def _moved(
        self, rng: np.random.Generator, n_draws: int, n_trajectories: int, max_gradients: int
    ) -> tuple[Moved, Drift | None]:
        """Move draws; no drift where too few of them could be."""
        q = self.q
        n_draws = min(n_draws, max(_FEWEST_MOVED, _MOVED_ELEMENTS // max(q.n_dim, 1)))
        base = self._base(n_draws, rng)
        moved = move(self.density, q, base, rng, n_trajectories=n_trajectories, max_gradients=max_gradients)
        if len(moved.end) < _LEAST_MOVED:
            return moved, None
        log_q = q.log_density(moved.start), q.log_density(moved.control)
        return moved, drift_of(moved, q.mean(), q.sd(), log_q)

    def _elsewhere(self, elbo: float, rng: np.random.Generator) -> list[Elsewhere]:
        """Look for mass that q misses."""
        places = other_modes(self.density, self.q, elbo, rng)
        fit = other_fit(self, elbo, rng)
        return places if fit is None else [*places, fit]


def _columns(drift: Drift | None, n_dim: int) -> dict[str, Array]:
    names = {"mean_drift": "mean", "sd_drift": "sd", "skewness_drift": "skewness"}
    result = {}
    for name, of in names.items():
        estimates = None if drift is None else getattr(drift, of)
        result[name] = np.full(n_dim, np.nan) if estimates is None else estimates.value
        result[f"{name}_se"] = np.full(n_dim, np.nan) if estimates is None else estimates.se
    return result
