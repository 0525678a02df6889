"""Moments of an approximate posterior by variable: covariances, and what PyMC calls its state."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from pymc.variational.opvi import VIState

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.results.convert import constrained_dataset, flat_dataset, indices_of, labelled
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
    constrainer = Constrainer.of(posterior.density, deterministics=False)
    values = constrainer(q.mean()[None])
    names = [rv.name for rv in model.free_RVs]
    unconstrained_sd = layout.unflatten(q.sd())
    sd = {
        **_constrained_sd(posterior, constrainer),
        **{n: unconstrained_sd[n] for n in names if n in unconstrained_sd},
    }
    mean_set = constrained_dataset(model, {n: values[n][0] for n in names})
    sd_set = constrained_dataset(model, {n: sd[n] for n in names})
    if posterior.include_transformed:
        mean_set = mean_set.merge(flat_dataset(layout, q.mean()), compat="override")
        sd_set = sd_set.merge(flat_dataset(layout, q.sd()), compat="override")
    return VIState(mean=mean_set, std=sd_set)


def _constrained_sd(posterior: Posterior, constrainer: Constrainer) -> dict[str, Array]:
    """Return the standard deviations over draws, accumulated chunk by chunk."""
    n_seen, rng = 0, np.random.default_rng(_SEED)
    mean: dict[str, Array] = {}
    square: dict[str, Array] = {}
    for size in chunks(_N_DRAWS, posterior.layout.n_dim):
        theta = posterior.draw(size, rng)
        for name, value in constrainer(theta).items():
            centre = value.mean(axis=0)
            shift = centre - mean.get(name, 0.0)
            weight = len(theta) / (n_seen + len(theta))
            mean[name] = mean.get(name, 0.0) + weight * shift
            spread = ((value - centre) ** 2).sum(axis=0) + n_seen * weight * shift**2
            square[name] = square.get(name, 0.0) + spread
        n_seen += len(theta)
    return {name: np.sqrt(total / (n_seen - 1)) for name, total in square.items()}
