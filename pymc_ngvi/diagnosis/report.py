"""The part of an approximation that says whether it can be relied on."""

import dataclasses

from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.diagnosis.budget import DIAGNOSIS, Budget, Costs
from pymc_ngvi.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.diagnosis.drift import Drift, drift_of
from pymc_ngvi.diagnosis.elsewhere import Elsewhere, other_fit, other_modes
from pymc_ngvi.diagnosis.findings import Context, findings_of, not_moved, unsettled
from pymc_ngvi.diagnosis.moves import Moved, move
from pymc_ngvi.diagnosis.tails import coordinate_khats
from pymc_ngvi.diagnosis.weights import DRAWS, WeightReport, judged
from pymc_ngvi.export import check_draws
from pymc_ngvi.progress import WorkProgress
from pymc_ngvi.psis import MIN_KHAT_DRAWS, Weights
from pymc_ngvi.result import Elbo
from pymc_ngvi.structure import Part
from pymc_ngvi.types import Array, VariationalState

#: Draws that are moved, trajectories of each, and gradients of all, about: by default, and thorough.
_QUICK, _THOROUGH = (256, 4, 6_000), (512, 16, 40_000)
#: Coordinates that get a k-hat of their own, at most: each takes two milliseconds.
_MOST_KHATS = 200
#: Numbers in the draws that are moved; at least so many draws.
_MOVED_ELEMENTS, _FEWEST_MOVED = 2**20, 48
#: Moved draws below which nothing is said of their moments.
_LEAST_MOVED = 32
#: Blocks from which on local coordinates count as effects of groups.
_FEWEST_GROUPS = 3
#: Number of the random stream behind the draws of the standing diagnosis that are moved.
_MOVES_STREAM = 3_000_001


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A diagnosis, and what it is of."""

    q: VariationalState
    density: Any
    share: tuple[float, float]
    diagnosis: Diagnosis


class DiagnosisReport(WeightReport):
    """The part of an approximation that says whether it can be relied on."""

    _kept: _Kept | None = None

    def diagnose(self, *, thorough: bool = False, draws: int | None = None, random_seed: Any = None) -> Diagnosis:
        """Return whether means and standard deviations of q can be relied on, why not, and what to do.

        Pareto k-hat sees tails, but not how much the bulk of q is off, nor a mode that q misses. So draws of q are
        also moved towards the posterior, by a few Hamiltonian trajectories: what their moments then change by, q is
        off by, at least.

        Parameters
        ----------
        thorough : bool, default False
            Move more draws for longer, look for other modes from dispersed points, and fit once more from a dispersed
            start.
        draws : int, optional
            Behind k-hat and the effective sample size, at least 100; fewer are used above 3,300 dimensions. Default:
            10,000, or, where evaluations are dear, as many as a budget allows; a number has no budget.
        random_seed : int, Generator or None
            By default one that belongs to the fit: the diagnosis is made once and kept until q changes.

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
        fit. By default there is a budget, of what the fit took or some seconds: a number of evaluations that follows
        from the graph, the sizes of the data and the evaluations of the fit, not from the clock. Where it is too small
        to tell, the verdict is "not judged". The report says what it took, and what was left out.

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

        if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
            raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
        self._check_weights()
        if not thorough and draws is None and random_seed is None:
            return self._standing(DIAGNOSIS)
        if thorough or draws is not None:
            budget = self._wanted(DRAWS if draws is None else draws, (_THOROUGH if thorough else _QUICK)[2])
        else:
            budget = self._budget(DIAGNOSIS)
        rng = self.generator(random_seed)
        with few_threads(self.density):
            diagnosis = self._diagnosed(budget, thorough, rng, rng)
        if thorough:
            self._kept = _Kept(self.q, self.density, DIAGNOSIS, diagnosis)
        return diagnosis

    def _standing(self, share: tuple[float, float]) -> Diagnosis:
        """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
        from pymc_ngvi.session import few_threads  # it imports what this belongs to

        kept = self._kept
        if kept is None or kept.q is not self.q or kept.density is not self.density:
            kept = self._kept = None
        if kept is not None and (not kept.diagnosis.left_out or kept.share >= share):
            return kept.diagnosis
        with few_threads(self.density):
            diagnosis = self._diagnosed(self._budget(share), False, None, self._own_generator(_MOVES_STREAM))
        self._kept = _Kept(self.q, self.density, share, diagnosis)
        return diagnosis

    def _verdict_if_known(self) -> str | None:
        kept = self._kept
        return kept.diagnosis.verdict if kept is not None and kept.q is self.q else None

    def _wanted(self, draws: int, gradients: int) -> Budget:
        return Budget(self._most_weighed(draws), min(_MOST_KHATS, self.layout.n_dim), gradients)

    def _budget(self, share: tuple[float, float]) -> Budget:
        """Return as much of a quick diagnosis as a share allows."""
        wanted = self._wanted(DRAWS, _QUICK[2])
        return Budget.of(share, Costs.of(self.density, self.q, self.record), self.record, wanted)

    def _diagnosed(
        self, budget: Budget, thorough: bool, of_weights: np.random.Generator | None, rng: np.random.Generator
    ) -> Diagnosis:
        """Make a diagnosis; the standing weights are taken where ``of_weights`` is None."""
        before = self.density.n_gradients
        with WorkProgress("Judging q", budget.n_weights + budget.n_gradients) as progress:
            weights, elbo, khats = self._weights_of(budget, of_weights, progress)
            moved, drift = self._moved(rng, *(_THOROUGH if thorough else _QUICK)[:2], budget, progress)
        fewer = budget.cut and (moved.n_trajectories < _QUICK[1] or len(moved.end) + moved.n_lost < self._most_moved())
        n_gradients = self.density.n_gradients - before
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
            n_gradients=self.density.n_gradients - before if thorough else n_gradients,
            n_log_p=weights.n_draws,
            layout=self.layout,
            left_out=_left_out(budget, moved, fewer),
            open=_open(budget, moved, drift) if fewer else "",
        )

    def _context(self) -> Context:
        structure = self.structure
        name = type(self.q).__name__.removesuffix("State").lower()
        return Context(
            layout=self.layout,
            record=self.record,
            family={"studentt": "student_t"}.get(name, name) if self.record is None else self.record.family,
            has_groups=_has_groups(structure.parts),
            has_hessian=self.density.has_hessian,
            of_bambi=any("|" in v.name and v.name.endswith("_offset") for v in self.layout.variables),
        )

    def _weights_of(
        self, budget: Budget, rng: np.random.Generator | None, progress: WorkProgress
    ) -> tuple[Weights, Elbo, Array]:
        """Return importance weights, the ELBO, and k-hats by coordinate, NaN where there are none."""
        khats, n = np.full(self.layout.n_dim, np.nan), budget.n_weights
        if not n:
            return Weights(np.nan, np.nan, 0, 0), Elbo(*((np.nan,) * 2)) if self.record is None else self.elbo, khats
        index = self._shown_first(budget.n_khats)
        if rng is None:
            ratio = self._own_ratio(n, progress.advance)
            of_draws = self._own_coordinates(len(ratio), index) if len(index) else np.empty((len(ratio), 0))
        else:
            ratio, of_draws = self._weighed(n, rng, index, progress.advance)
        finite = np.isfinite(ratio)
        if finite.sum() >= MIN_KHAT_DRAWS:
            standardised = (of_draws[finite] - self.q.mean()[index]) / self.q.sd()[index]
            khats[index] = coordinate_khats(ratio[finite], standardised)
        return *judged(ratio), khats

    def _shown_first(self, n_most: int) -> NDArray[np.intp]:
        """Return the coordinates whose k-hats are computed: all, or global ones first."""
        n_dim = self.layout.n_dim
        if n_dim <= n_most:
            return np.arange(n_dim)
        border = self.structure.border
        return np.concatenate([border, np.setdiff1d(np.arange(n_dim), border)])[:n_most]

    def _most_moved(self, n_draws: int = _QUICK[0]) -> int:
        """Return how many of some draws can be moved at once."""
        return min(n_draws, max(_FEWEST_MOVED, _MOVED_ELEMENTS // max(self.layout.n_dim, 1)))

    def _moved(
        self, rng: np.random.Generator, n_draws: int, n_trajectories: int, budget: Budget, progress: WorkProgress
    ) -> tuple[Moved, Drift | None]:
        """Move draws; no drift where too few of them could be."""
        q = self.q
        base = self._base(self._most_moved(n_draws), rng)
        moved = move(
            self.density, q, base, rng, n_trajectories=n_trajectories, max_gradients=budget.n_gradients,
            strict=budget.cut, advance=progress.advance,
        )  # fmt: skip
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


def _has_groups(parts: tuple[Part, ...]) -> bool:
    """Tell whether there are several blocks given global parameters: not a chain that is cut, nor a field."""
    local = sum(len(part.sizes) for part in parts if part.kind == "blocks")
    return local >= _FEWEST_GROUPS and any(part.kind == "global" for part in parts)


def _left_out(budget: Budget, moved: Moved, fewer: bool) -> tuple[str, ...]:
    """Return what a budget does not allow."""
    result = []
    if budget.n_weights == 0:
        result.append("importance weights and their k-hat")
    elif budget.weights_cut:
        result.append(f"importance weights of more than {budget.n_weights:,} draws")
    if not_moved(moved):
        result.append("moved draws")
    elif fewer:
        times = f", {moved.n_trajectories} trajectories each" if moved.n_trajectories < _QUICK[1] else ""
        result.append(f"more than {len(moved.end)} moved draws{times}")
    return tuple(result)


def _open(budget: Budget, moved: Moved, drift: Drift | None) -> str:
    """Return why few evaluations leave the verdict open; empty where they do not."""
    if not unsettled(moved, drift):
        return ""
    if not_moved(moved):
        return (
            f"too few evaluations within the budget, {budget.n_gradients:,} gradients, to move draws of q towards the "
            "posterior."
        )
    return (
        f"{len(moved.end)} moved draws, all that the budget of {budget.n_gradients:,} gradients allows, do not tell "
        "whether means and standard deviations are right."
    )
