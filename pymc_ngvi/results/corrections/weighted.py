"""Draws of q weighted or resampled by importance, and moments that are corrected by their weights."""

import warnings

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.convert import constrained_dataset
from pymc_ngvi.results.corrections.importance import Correction, ImportanceWeights
from pymc_ngvi.results.corrections.resampling import without_replacement
from pymc_ngvi.results.corrections.weighted_moments import MomentSums, WeightedMoments
from pymc_ngvi.results.posterior import Posterior

#: Draws of q for each one that is resampled, and the fewest of them.
POOL, SMALLEST_POOL = 10, 10_000
#: Weight of the pool that resampling may leave out without a warning.
_LEFT_OUT = 0.03


class WeightedDraws(NamedTuple):
    """Draws, and what is known of them.

    Parameters
    ----------
    theta : ndarray, shape (n_draws, n_dim)
        Unconstrained.
    log_p : ndarray, shape (n_draws,), or None
        Where it was evaluated.
    stats : dict
        More for ``sample_stats``, (n_draws,) each.
    attrs : dict
        For the groups ``posterior`` and ``sample_stats``.
    """

    theta: Array
    log_p: Array | None
    stats: dict[str, NDArray[np.generic]]
    attrs: dict[str, Any]


def weighted_draws(posterior: Posterior, draws: int, importance: str | None, rng: np.random.Generator) -> WeightedDraws:
    """Return draws of q, or of q as corrected by importance weights.

    Parameters
    ----------
    posterior : Posterior
    draws : int
    importance : {"psis", "psir"}, optional
        Weights with the draws, or draws resampled from a pool.
    rng : numpy.random.Generator

    Raises
    ------
    ValueError
        For another word; where weights can't help, or the density of q is not known.
    """
    if importance is None:
        return WeightedDraws(posterior.draw(draws, rng), None, {}, {})
    if importance not in ("psis", "psir"):
        raise ValueError(f"importance should be 'psis', 'psir' or None; got {importance!r}.")
    posterior.check_correctable(f"importance={importance!r}")
    posterior.check_weights()
    return (_smoothed if importance == "psis" else _resampled)(posterior, draws, rng)


def _smoothed(posterior: Posterior, draws: int, rng: np.random.Generator) -> WeightedDraws:
    theta = posterior.draw(draws, rng)
    log_p = posterior.density.logp(theta)
    weights = ImportanceWeights.of(log_p, posterior.log_q(theta))
    weights.check()
    sums = MomentSums(draws)
    sums.add(theta, weights.weights)
    correction = Correction.of(weights, sums)
    _warn(correction)
    note = "draws of q, to be weighted by exp(log_weight) of sample_stats"
    return WeightedDraws(theta, log_p, {"log_weight": weights.log_weights}, {"importance": note, **correction.attrs()})


def _resampled(posterior: Posterior, draws: int, rng: np.random.Generator) -> WeightedDraws:
    n_pool, seed = max(POOL * draws, SMALLEST_POOL), int(rng.integers(2**63))
    weights = _weights(posterior, n_pool, seed)
    weights.check(POOL)
    correction = Correction.of(weights, _sums(posterior, weights, seed)["theta"])
    _warn(correction, POOL)
    chosen, left_out = without_replacement(weights.weights, draws, rng)
    if left_out > _LEFT_OUT:
        warnings.warn(
            f"{left_out:.0%} of the weight of {n_pool:,} draws of q is left out, since {draws:,} different draws "
            "can't carry it: tails are too short. Take fewer draws, or importance='psis'.",
            UserWarning,
            skip_file_prefixes=OURS,
        )
    theta, start = np.empty((draws, posterior.layout.n_dim)), 0
    for pool in _pool(posterior, n_pool, seed):
        here = (chosen >= start) & (chosen < start + len(pool))
        theta[here] = pool[chosen[here] - start]
        start += len(pool)
    note = f"resampled without replacement from {n_pool:,} draws of q: equally weighted"
    attrs = {"importance": note, "pool_draws": n_pool, "weight_left_out": left_out, **correction.attrs()}
    return WeightedDraws(theta, None, {}, attrs)


def _pool(posterior: Posterior, draws: int, seed: int) -> Iterator[Array]:
    """Yield draws of q in chunks: the same ones whenever it is gone through, so that they need not be kept."""
    for i, size in enumerate(chunks(draws, posterior.layout.n_dim)):
        rng = np.random.default_rng([seed, i])
        yield posterior.distribution.draw(size, rng)


def _weights(posterior: Posterior, draws: int, seed: int) -> ImportanceWeights:
    pairs = [(posterior.density.logp(theta), posterior.log_q(theta)) for theta in _pool(posterior, draws, seed)]
    log_p, log_q = (np.concatenate(of) for of in zip(*pairs, strict=True))
    return ImportanceWeights.of(log_p, log_q)


def _sums(
    posterior: Posterior, weights: ImportanceWeights, seed: int, names: Sequence[str] = ()
) -> dict[str, MomentSums]:
    """Return the sums over a pool for the unconstrained coordinates, "theta", and for variables by name."""
    sums = {name: MomentSums(weights.n_draws) for name in ("theta", *names)}
    start = 0
    for theta in _pool(posterior, weights.n_draws, seed):
        now = weights.weights[start : start + len(theta)]
        values = posterior.constrain(theta, random_seed=(seed + start) % 2**31) if names else {}
        for name, total in sums.items():
            total.add(theta if name == "theta" else values[name], now)
        start += len(theta)
    return sums


def corrected_moments(
    posterior: Posterior, draws: int, rng: np.random.Generator, *, transformed: bool = False
) -> xr.Dataset:
    """Return means and standard deviations corrected by importance weights, beside those of q.

    Parameters
    ----------
    posterior : Posterior
    draws : int
        At least 100.
    rng : numpy.random.Generator
    transformed : bool, default False
        Have the unconstrained variables, too.

    Returns
    -------
    xarray.Dataset
        See `NGVIApproximation.corrected`.
    """
    posterior.check_correctable("corrected()")
    posterior.check_weights()
    seed, model = int(rng.integers(2**63)), posterior.model
    weights = _weights(posterior, draws, seed)
    weights.check()
    shown = [rv.name for rv in model.free_RVs] + [d.name for d in posterior.density.deterministics]
    if transformed:
        shown += [v.value_name for v in posterior.layout.variables if v.value_name not in shown]
    sums = _sums(posterior, weights, seed, shown)
    correction = Correction.of(weights, sums.pop("theta"))
    _warn(correction)
    result = _by_estimate(model, {name: total.result() for name, total in sums.items()})
    result.attrs = correction.attrs()
    return result


def _by_estimate(model: pm.Model, moments: dict[str, WeightedMoments]) -> xr.Dataset:
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


def _warn(correction: Correction, per_draw: int = 1) -> None:
    if not correction.helps:
        warnings.warn(correction.sentence(per_draw), UserWarning, skip_file_prefixes=OURS)
