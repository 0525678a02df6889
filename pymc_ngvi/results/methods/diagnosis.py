"""The part of an approximation that says whether it can be relied on."""

import dataclasses

from typing import Any

from pymc_ngvi.core.psis import MIN_KHAT_DRAWS
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.results.diagnosis.budget import DIAGNOSIS
from pymc_ngvi.results.diagnosis.diagnose import budget_of, diagnose, full_budget
from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.weights import DRAWS, own_generator
from pymc_ngvi.results.methods.weights import WeightReport
from pymc_ngvi.results.posterior import Distribution

#: Number of the random stream behind the draws of the standing diagnosis that are moved.
_MOVES_STREAM = 3_000_001


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A diagnosis, and what it is of."""

    q: Distribution
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
        off by, at least. And labels are exchanged and signs changed: where log p stays the same, but q does not, q
        covers one of several equal modes.

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
        ...     approx = pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=1, progressbar=False)
        >>> diagnosis = approx.diagnose(random_seed=1)
        >>> diagnosis.reliable
        False
        >>> "`v`" in diagnosis.reasons[0]
        True
        """
        if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
            raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
        self._posterior.check_weights()
        if not thorough and draws is None and random_seed is None:
            return self._standing(DIAGNOSIS)
        if thorough or draws is not None:
            budget = full_budget(self._posterior, DRAWS if draws is None else draws, thorough=thorough)
        else:
            budget = budget_of(self._posterior, DIAGNOSIS)
        rng = self.generator(random_seed)
        with few_threads(self.density):
            diagnosis = diagnose(self._posterior, budget, rng, rng, thorough=thorough)
        if thorough:
            self._kept = _Kept(self._distribution, self.density, DIAGNOSIS, diagnosis)
        return diagnosis

    def _standing(self, share: tuple[float, float]) -> Diagnosis:
        """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
        kept = self._kept
        if kept is None or kept.q is not self._distribution or kept.density is not self.density:
            kept = self._kept = None
        if kept is not None and (not kept.diagnosis.left_out or kept.share >= share):
            return kept.diagnosis
        with few_threads(self.density):
            budget, rng = budget_of(self._posterior, share), own_generator(self.record, _MOVES_STREAM)
            diagnosis = diagnose(self._posterior, budget, self._own_ratio, rng)
        self._kept = _Kept(self._distribution, self.density, share, diagnosis)
        return diagnosis

    def _judged(self) -> tuple[Diagnosis, tuple[float, float]] | None:
        """Return the diagnosis that belongs to q, and the share that it was given; None where none was made."""
        kept = self._kept
        known = kept is not None and kept.q is self._distribution and kept.density is self.density
        return (kept.diagnosis, kept.share) if kept is not None and known else None

    def _keep(self, diagnosis: Diagnosis, share: tuple[float, float]) -> None:
        """Take a diagnosis as that which belongs to q."""
        self._kept = _Kept(self._distribution, self.density, share, diagnosis)

    def _verdict_if_known(self) -> str | None:
        kept = self._kept
        return kept.diagnosis.verdict if kept is not None and kept.q is self._distribution else None
