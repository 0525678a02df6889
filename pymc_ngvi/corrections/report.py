"""The corrections that an approximation offers: weighted and resampled draws, corrected moments, linear response."""

import warnings

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.convert import constrained_dataset
from pymc_ngvi.corrections.drawn import Drawn
from pymc_ngvi.corrections.importance import ImportanceWeights, Verdict
from pymc_ngvi.corrections.moments import Moments, MomentSums
from pymc_ngvi.corrections.quantities import Quantities
from pymc_ngvi.corrections.resampling import without_replacement
from pymc_ngvi.corrections.response import ElboHessian, covariance, n_solves, products_at
from pymc_ngvi.defaults import OURS
from pymc_ngvi.diagnostics import FitReport
from pymc_ngvi.draws import sobol_draws
from pymc_ngvi.export import check_cov_size, check_draws
from pymc_ngvi.families import BlockState, DiagonalState
from pymc_ngvi.status import Status
from pymc_ngvi.types import Array

#: Draws of q for each one that is resampled, and the fewest of them.
POOL, SMALLEST_POOL = 10, 10_000
#: Weight of the pool that resampling may leave out without a warning.
_LEFT_OUT = 0.03
#: Seed of the fixed draws of linear response: its result does not change by itself.
_RESPONSE_SEED = 20_180_051


@dataclass(frozen=True, eq=False)
class LinearResponse:
    """Covariances of the posterior by linear response.

    Parameters
    ----------
    cov : xarray.DataArray
        Square; both axes are labelled: ``beta[3]``, ``sd_log__``.
    sd : xarray.Dataset
        Standard deviations by variable, with its dims and coords.
    n_products : int
        Hessian-vector products that the solves took.
    """

    cov: xr.DataArray
    sd: xr.Dataset
    n_products: int


class CorrectionReport(FitReport):
    """The part of an approximation that corrects q."""

    def _drawn(self, draws: int, importance: str | None, rng: np.random.Generator) -> Drawn:
        """Return draws of q, or of q as corrected by importance weights."""
        if importance is None:
            return super()._drawn(draws, importance, rng)
        if importance not in ("psis", "psir"):
            raise ValueError(f"importance should be 'psis', 'psir' or None; got {importance!r}.")
        self._check_weights()
        return self._smoothed(check_draws(draws), rng) if importance == "psis" else self._resampled(draws, rng)

    def _smoothed(self, draws: int, rng: np.random.Generator) -> Drawn:
        theta = self.draw_flat(draws, rng)
        log_p = self.log_p(theta)
        weights = ImportanceWeights.of(log_p, self.log_q(theta))
        weights.check()
        sums = MomentSums(draws)
        sums.add(theta, weights.weights)
        verdict = Verdict.of(weights, sums)
        _warn(verdict)
        note = "draws of q, to be weighted by exp(log_weight) of sample_stats"
        return Drawn(theta, log_p, {"log_weight": weights.log_weights}, {"importance": note, **verdict.attrs()})

    def _resampled(self, draws: int, rng: np.random.Generator) -> Drawn:
        draws = check_draws(draws)
        n_pool, seed = max(POOL * draws, SMALLEST_POOL), int(rng.integers(2**63))
        weights = self._weights(n_pool, seed)
        weights.check(POOL)
        verdict = Verdict.of(weights, self._sums(weights, seed)["theta"])
        _warn(verdict, POOL)
        chosen, left_out = without_replacement(weights.weights, draws, rng)
        if left_out > _LEFT_OUT:
            warnings.warn(
                f"{left_out:.0%} of the weight of {n_pool:,} draws of q is left out, since {draws:,} different draws "
                "can't carry it: tails are too short. Take fewer draws, or importance='psis'.",
                UserWarning,
                skip_file_prefixes=OURS,
            )
        theta, start = np.empty((draws, self.layout.n_dim)), 0
        for pool in self._pool(n_pool, seed):
            here = (chosen >= start) & (chosen < start + len(pool))
            theta[here] = pool[chosen[here] - start]
            start += len(pool)
        note = f"resampled without replacement from {n_pool:,} draws of q: equally weighted"
        attrs = {"importance": note, "pool_draws": n_pool, "weight_left_out": left_out, **verdict.attrs()}
        return Drawn(theta, None, {}, attrs)

    def _pool(self, draws: int, seed: int) -> Iterator[Array]:
        """Yield draws of q in chunks: the same ones whenever it is gone through, so that they need not be kept."""
        for i, size in enumerate(self._chunks(draws)):
            rng = np.random.default_rng([seed, i])
            yield self.q.draws(self._base(size, rng))

    def _weights(self, draws: int, seed: int) -> ImportanceWeights:
        pairs = [(self.log_p(theta), self.log_q(theta)) for theta in self._pool(draws, seed)]
        log_p, log_q = (np.concatenate(of) for of in zip(*pairs, strict=True))
        return ImportanceWeights.of(log_p, log_q)

    def _sums(self, weights: ImportanceWeights, seed: int, names: Sequence[str] = ()) -> dict[str, MomentSums]:
        """Return the sums over a pool for the unconstrained coordinates, "theta", and for variables by name."""
        sums = {name: MomentSums(weights.n_draws) for name in ("theta", *names)}
        start = 0
        for theta in self._pool(weights.n_draws, seed):
            now = weights.weights[start : start + len(theta)]
            values = self._constrainer(theta, random_seed=(seed + start) % 2**31) if names else {}
            for name, total in sums.items():
                total.add(theta if name == "theta" else values[name], now)
            start += len(theta)
        return sums

    def corrected(
        self, draws: int = 10_000, *, random_seed: Any = None, include_transformed: bool | None = None
    ) -> xr.Dataset:
        """Return means and standard deviations corrected by importance weights, beside those of q.

        Parameters
        ----------
        draws : int, default 10_000
            Of q; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        include_transformed : bool, optional
            Have the unconstrained variables, too. Default: the attribute of that name.

        Returns
        -------
        xarray.Dataset
            Free variables on their constrained scale, and Deterministics, with two dims before their own: ``moment``
            ("mean", "sd") and ``estimate`` ("corrected", its Monte Carlo standard error "se", and "uncorrected", which
            is that of the same draws without weights). ``attrs`` has ``khat``, ``effective_sample_size``, and in
            ``correction`` a sentence on what the weights change, and with what error.

        Raises
        ------
        ValueError
            Where k-hat says that weights can't help; where ``pm.set_data`` changed the data after the fit; for a model
            that reads minibatches.

        Warns
        -----
        UserWarning
            Where the error of the weights is larger than what they correct.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState
        >>> from pymc_ngvi.model import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 0.0, 1.0)
        >>> q = DiagonalState.from_scale(np.array([0.2]), np.array([1.2]))
        >>> approx = NGVIApproximation(LogDensity(model), q)
        >>> found = approx.corrected(random_seed=1)
        >>> found["x"].sel(moment="sd", estimate=["corrected", "uncorrected"]).values.round(1)
        array([1. , 1.2])
        """
        self._check_weights()
        draws, seed = check_draws(draws), int(self.generator(random_seed).integers(2**63))
        weights = self._weights(draws, seed)
        weights.check()
        transformed = self.include_transformed if include_transformed is None else include_transformed
        shown = [rv.name for rv in self.model.free_RVs] + [d.name for d in self.model.deterministics]
        if transformed:
            shown += [v.value_name for v in self.layout.variables if v.value_name not in shown]
        sums = self._sums(weights, seed, shown)
        verdict = Verdict.of(weights, sums.pop("theta"))
        _warn(verdict)
        moments = {name: total.result() for name, total in sums.items()}
        result = _by_estimate(self.model, moments)
        result.attrs = verdict.attrs()
        return result

    def linear_response(
        self,
        names: str | Sequence[str] | None = None,
        *,
        draws: int = 128,
        tol: float = 1e-6,
        random_seed: Any = _RESPONSE_SEED,
    ) -> LinearResponse:
        """Return covariances with the correlations that a diagonal or block family leaves out [1]_.

        It is how the mean of q moves when log p is tilted, from the Hessian of the ELBO at the optimum on fixed
        quasi-random draws: exact where the posterior is Gaussian. Means stay those of q.

        Parameters
        ----------
        names : str or sequence of str, optional
            Of unconstrained values (``sd_log__``), of random variables on their constrained scale (``sd``), or of
            Deterministics; the last two by the delta method at the mean of q. Default: all unconstrained values. Only
            what is asked for is solved for.
        draws : int, default 128
            A power of 2, at least 2.
        tol : float, default 1e-6
            Relative residual of the conjugate gradients.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the draws; by default they are the same in each call.

        Returns
        -------
        LinearResponse
            ``cov``, labelled as that of `cov_of`; ``sd`` by variable; ``n_products``.

        Raises
        ------
        ValueError
            For families that have correlations; where the fit has not converged, or the Hessian of the ELBO is not
            negative definite; for unknown names; where ``pm.set_data`` changed the data after the fit; for a model
            that reads minibatches; for more than 5,000 quantities.

        References
        ----------
        .. [1] Giordano, Broderick, Jordan (2018). Covariances, robustness, and variational Bayes. JMLR 19(51).
           https://doi.org/10.48550/arXiv.1709.02536

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState
        >>> from pymc_ngvi.model import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.MvNormal("x", np.zeros(2), cov=[[1.0, 0.6], [0.6, 1.0]])
        >>> q = DiagonalState.from_scale(np.zeros(2), np.array([0.8, 0.8]))  # the best of its family
        >>> NGVIApproximation(LogDensity(model), q).linear_response().cov.values.round(6)
        array([[1. , 0.6],
               [0.6, 1. ]])
        """
        q = self._without_correlations()
        if draws != int(draws) or draws < 2 or int(draws) & (int(draws) - 1):
            raise ValueError(f"The draws of linear_response should be a power of 2, at least 2; got {draws!r}.")
        asked = Quantities.of(names, self.layout, self._constrainer, q.mean(), q.sd())
        check_cov_size(len(asked.jacobian))
        z = sobol_draws(int(draws), q.n_dim, self.generator(random_seed)).z
        products = products_at(self.density, q.draws(z), q.sd(), n_solves(asked.jacobian))
        hessian = ElboHessian(q, z, products)
        cov = covariance(hessian, asked.jacobian, tol)
        sd = asked.dataset(np.sqrt(np.maximum(np.diag(cov), 0.0)), self.layout, self.model)
        return LinearResponse(asked.matrix(cov), sd, hessian.n_products)

    def _without_correlations(self) -> DiagonalState | BlockState:
        """Return q; raise ValueError where linear response has nothing to add to it, or nothing to go by."""
        q = self.q
        if not isinstance(q, DiagonalState | BlockState):
            raise ValueError(
                "linear_response() adds the correlations that family='diagonal' and 'block' leave out, and q is a "
                f"{type(q).__name__}, which has its own: see cov_of()."
            )
        if self.density.has_minibatch:
            raise ValueError(
                "The model reads pm.Minibatch data, and linear response needs the Hessian given all of them: build the "
                "model on all of the data."
            )
        self.refuse_changed_data("The model's posterior is another one now than q approximates")
        if self.record is not None and self.record.status is not Status.CONVERGED:
            status = self.record.status
            raise ValueError(
                f"Linear response is that of an optimum, and the fit has not converged ({status}). {status.sentence} "
                f"{status.cure}"
            )
        return q


def _by_estimate(model: Any, moments: dict[str, Moments]) -> xr.Dataset:
    """Return moments as a Dataset with dims ``moment`` and ``estimate`` before those of each variable."""
    estimates = ["corrected", "se", "uncorrected"]
    tables = [
        [
            constrained_dataset(model, {name: getattr(getattr(of, moment), field) for name, of in moments.items()})
            for field in estimates
        ]
        for moment in ("mean", "sd")
    ]
    taken = set(moments) | {str(dim) for dim in tables[0][0].dims}
    first, second = (f"q_{name}" if name in taken else name for name in ("moment", "estimate"))
    rows = [xr.concat(row, dim=second).assign_coords({second: estimates}) for row in tables]
    return xr.concat(rows, dim=first).assign_coords({first: ["mean", "sd"]})


def _warn(verdict: Verdict, per_draw: int = 1) -> None:
    if not verdict.helps:
        warnings.warn(verdict.sentence(per_draw), UserWarning, skip_file_prefixes=OURS)
