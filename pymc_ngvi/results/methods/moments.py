"""Moments of q by variable: means, standard deviations, covariances."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from pymc.variational.opvi import VIState

from pymc_ngvi.core.types import Array
from pymc_ngvi.model.constrain import Constrainer
from pymc_ngvi.results.convert import constrained_dataset, flat_dataset, indices_of
from pymc_ngvi.results.methods.draws import Exports

#: Draws behind ``state.std``, and behind covariances; their seed: fixed, so that these do not change by themselves.
_N_DRAWS, _N_COV_DRAWS, _SEED = 4_000, 10_000, 20_240_607


def _labelled(labels: list[str], matrix: Array, axis: str = "unconstrained") -> xr.DataArray:
    """Return a covariance with labels on both axes: ``beta[3]``, ``sd_log__``."""
    dims = (axis, f"{axis}_2")
    return xr.DataArray(matrix, dims=dims, coords={dim: labels for dim in dims}, name="covariance")


class Marginals(Exports):
    """The part of an approximation that shows moments of q by variable, without PyTensor nodes."""

    @property
    def mean_flat(self) -> Array:
        """Mean, (n_dim,), unconstrained."""
        return self._distribution.mean()

    @property
    def sd_flat(self) -> Array:
        """Standard deviations, (n_dim,), unconstrained."""
        return self._distribution.sd()

    @property
    def mean_data(self) -> xr.Dataset:
        """Unconstrained mean by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self._distribution.mean())

    @property
    def std_data(self) -> xr.Dataset:
        """Unconstrained standard deviations by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self._distribution.sd())

    def cov_of(self, names: str | Sequence[str], *, constrained: bool = False) -> xr.DataArray:
        """Return the covariance of some variables.

        Parameters
        ----------
        names : str or sequence of str
            Free variables (``sd``) or their unconstrained values (``sd_log__``), labels of single coordinates
            (``beta[3]``), Deterministics.
        constrained : bool, default False
            Take free variables on their constrained scale.

        Returns
        -------
        xarray.DataArray
            Square; labels on both axes. Of the unconstrained coordinates of free variables (``sd_log__``), exact, by
            default. With Deterministics among the names, which have one scale only, or with ``constrained=True``: from
            10,000 draws with a fixed seed.

        Raises
        ------
        ValueError
            For unknown names; above 5,000 dimensions of q where its family can't give a part of the covariance.

        Notes
        -----
        Up to 1,000 dimensions, the draws have the exact mean and covariance where q is Gaussian, and so do all linear
        functions of the unconstrained values, such as contrasts.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", 0.0, [1.0, 2.0])
        ...     contrast = pm.Deterministic("contrast", x[1] - x[0])
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> round(float(approx.cov_of("contrast")[0, 0]), 4)
        5.0
        """
        wanted = [names] if isinstance(names, str) else list(names)
        derived = {d.name for d in self.model.deterministics}
        of_draws = derived & set(wanted)
        index = indices_of(self.layout, [name for name in wanted if name not in of_draws], derived)
        if of_draws or constrained:
            return self._cov_of_draws(wanted, derived, constrained)
        labels = [self.layout.label(int(i)) for i in index]
        return _labelled(labels, self._distribution.cov_block(index))

    def _cov_of_draws(self, wanted: list[str], derived: set[str], constrained: bool) -> xr.DataArray:
        """Return the covariance of variables of any kind, from draws."""
        scaled = derived | ({v.name for v in self.layout.variables} if constrained else set())
        constrainer = Constrainer.of(self.density, names=frozenset(wanted) & scaled)
        theta = self._distribution.draw_matched(_N_COV_DRAWS, np.random.default_rng(_SEED))
        values = constrainer(theta)
        columns, labels = [], []
        for name in wanted:
            if name in scaled:
                shape = values[name].shape[1:]
                columns.append(values[name].reshape(len(theta), -1))
                labels += [name + (f"[{','.join(map(str, at))}]" if at else "") for at in np.ndindex(shape)]
            else:
                index = indices_of(self.layout, name)
                columns.append(theta[:, index])
                labels += [self.layout.label(int(k)) for k in index]
        table = np.concatenate(columns, axis=1, dtype=np.float64)
        table = table[np.isfinite(table).all(axis=1)]
        table -= table.mean(axis=0)
        return _labelled(labels, table.T @ table / len(table), "variable")

    @property
    def state(self) -> VIState:
        """Mean and standard deviation of the free variables on their constrained scale, as Datasets.

        ``mean`` is the constrained value of the unconstrained mean, as in PyMC. ``std`` is the standard deviation of
        the constrained variables, from 4,000 draws with a fixed seed. (PyMC's own ``std`` is the constrained value
        of the unconstrained standard deviation, which is not the spread of anything.)
        """
        constrainer = Constrainer.of(self.density, deterministics=False)
        values = constrainer(self._distribution.mean()[None])
        names = [rv.name for rv in self.model.free_RVs]
        unconstrained_sd = self.layout.unflatten(self._distribution.sd())
        sd = {
            **self._constrained_sd(constrainer),
            **{n: unconstrained_sd[n] for n in names if n in unconstrained_sd},
        }
        mean_set = constrained_dataset(self.model, {n: values[n][0] for n in names})
        sd_set = constrained_dataset(self.model, {n: sd[n] for n in names})
        if self.include_transformed:
            mean_set = mean_set.merge(self.mean_data, compat="override")
            sd_set = sd_set.merge(self.std_data, compat="override")
        return VIState(mean=mean_set, std=sd_set)

    def _constrained_sd(self, constrainer: Constrainer) -> dict[str, Array]:
        """Return the standard deviations over draws, accumulated chunk by chunk."""
        n_seen = 0
        mean: dict[str, Array] = {}
        square: dict[str, Array] = {}
        for theta in self._draw_chunks(_N_DRAWS, _SEED):
            for name, value in constrainer(theta).items():
                centre = value.mean(axis=0)
                shift = centre - mean.get(name, 0.0)
                weight = len(theta) / (n_seen + len(theta))
                mean[name] = mean.get(name, 0.0) + weight * shift
                spread = ((value - centre) ** 2).sum(axis=0) + n_seen * weight * shift**2
                square[name] = square.get(name, 0.0) + spread
            n_seen += len(theta)
        return {name: np.sqrt(total / (n_seen - 1)) for name, total in square.items()}
