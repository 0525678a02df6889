"""Moments of an approximate posterior by variable: covariances, and what PyMC calls its state."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from pymc.variational.opvi import VIState

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.results.convert import constrained_dataset, flat_dataset, indices_of, labelled
from pymc_ngvi.results.corrections import MomentSums
from pymc_ngvi.results.posterior import Posterior

#: Draws behind standard deviations of constrained variables, and behind covariances; their seed: fixed, so that these
#: do not change by themselves.
_N_DRAWS, _N_COV_DRAWS, _SEED = 4_000, 10_000, 20_240_607


def covariance_of(posterior: Posterior, names: str | Sequence[str], *, constrained: bool) -> xr.DataArray:
    """Return the covariance of some variables; see `NGVIApproximation.cov_of`."""
    wanted, layout = [names] if isinstance(names, str) else list(names), posterior.layout
    derived = {d.name for d in posterior.density.deterministics}
    of_draws = derived & set(wanted)
    index = indices_of(layout, [name for name in wanted if name not in of_draws], derived)
    if of_draws or constrained:
        scaled = derived | ({v.name for v in layout.variables} if constrained else set())
        return _covariance_of_draws(posterior, wanted, scaled)
    return labelled([layout.label(int(i)) for i in index], posterior.distribution.cov_block(index))


def _covariance_of_draws(posterior: Posterior, wanted: list[str], scaled: set[str]) -> xr.DataArray:
    """Return the covariance of variables of any kind, from draws."""
    layout = posterior.layout
    constrainer = Constrainer.of(posterior.density, names=frozenset(wanted) & scaled)
    theta = posterior.distribution.draw_matched(_N_COV_DRAWS, np.random.default_rng(_SEED))
    values = constrainer(theta)
    columns, labels = [], []
    for name in wanted:
        if name in scaled:
            shape = values[name].shape[1:]
            columns.append(values[name].reshape(len(theta), -1))
            labels += [name + (f"[{','.join(map(str, at))}]" if at else "") for at in np.ndindex(shape)]
        else:
            index = indices_of(layout, name)
            columns.append(theta[:, index])
            labels += [layout.label(int(k)) for k in index]
    table = np.concatenate(columns, axis=1, dtype=np.float64)
    table = table[np.isfinite(table).all(axis=1)]
    table -= table.mean(axis=0)
    return labelled(labels, table.T @ table / len(table), "variable")


def constrained_state(posterior: Posterior) -> VIState:
    """Return constrained means and standard deviations; see `NGVIApproximation.state`."""
    q, layout, model = posterior.distribution, posterior.layout, posterior.model
    constrainer, rng = Constrainer.of(posterior.density, deterministics=False), np.random.default_rng(_SEED)
    names = [rv.name for rv in model.free_RVs]
    values, sums = constrainer(q.mean()[None]), {name: MomentSums(_N_DRAWS) for name in names}
    for size in chunks(_N_DRAWS, layout.n_dim):
        draws = constrainer(posterior.draw(size, rng))
        for name in names:
            sums[name].add(draws[name], np.full(size, 1.0 / _N_DRAWS))
    unconstrained_sd, unbiased = layout.unflatten(q.sd()), np.sqrt(_N_DRAWS / (_N_DRAWS - 1.0))
    sd = {name: unbiased * of.result().sd.uncorrected for name, of in sums.items()}
    sd |= {name: unconstrained_sd[name] for name in names if name in unconstrained_sd}
    mean_set = constrained_dataset(model, {n: values[n][0] for n in names})
    sd_set = constrained_dataset(model, sd)
    if posterior.include_transformed:
        mean_set = mean_set.merge(flat_dataset(layout, q.mean()), compat="override")
        sd_set = sd_set.merge(flat_dataset(layout, q.sd()), compat="override")
    return VIState(mean=mean_set, std=sd_set)
