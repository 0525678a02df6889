"""Named quantities of a model near the mean of q: what they depend on, and what their parts are called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.results.convert import constrained_dataset, dims_of, labelled

#: Step of differences, in standard deviations of q: large enough for values in single precision.
_STEP = 1e-3
#: Numbers that a batch of evaluations returns, about.
_BATCH = 2**22

#: Values by name, (n_points, ...), at unconstrained points, (n_points, n_dim).
Constrain = Callable[[Array], dict[str, NDArray[np.generic]]]


@dataclass(frozen=True, eq=False)
class Quantities:
    """Some variables, one after the other as one vector, and their derivatives.

    Parameters
    ----------
    shapes : dict
        Name to shape.
    jacobian : ndarray, shape (n_entries, n_dim)
        Derivatives with respect to the unconstrained coordinates.
    unconstrained : bool
        Whether all entries are unconstrained coordinates themselves.
    """

    shapes: dict[str, tuple[int, ...]]
    jacobian: Array
    unconstrained: bool

    @classmethod
    def of(
        cls, names: str | Sequence[str] | None, layout: Layout, constrain: Constrain, mean: Array, sd: Array
    ) -> "Quantities":
        """Find quantities by name, and differentiate those that are not coordinates.

        Parameters
        ----------
        names : str, sequence of str or None
            Of unconstrained values (``sd_log__``), of random variables on their constrained scale, or of
            Deterministics. None stands for all unconstrained values.
        layout : Layout
        constrain : callable
        mean, sd : ndarray, shape (n_dim,)
            Where derivatives are taken, and the scale of the steps.

        Raises
        ------
        ValueError
            For an unknown name, listing the known ones.
        """
        values = {v.value_name: v for v in layout.variables}
        wanted = list(values) if names is None else [names] if isinstance(names, str) else list(dict.fromkeys(names))
        others = [name for name in wanted if name not in values]
        shapes = {name: v.shape for name, v in values.items()}
        derivatives: dict[str, Array] = {}
        if others:
            at_mean = constrain(mean[None])
            known = [*values, *(name for name in at_mean if name not in values)]
            if unknown := [name for name in others if name not in at_mean]:
                raise ValueError(
                    f"No variable is called {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, known))}."
                )
            shapes |= {name: at_mean[name].shape[1:] for name in others}
            derivatives = _differences(others, constrain, at_mean, mean, sd)
        axes = {name: np.eye(v.size, layout.n_dim, v.where.start) for name, v in values.items() if name in set(wanted)}
        jacobian = np.concatenate([(axes | derivatives)[name] for name in wanted])
        return cls({name: shapes[name] for name in wanted}, jacobian, not others)

    def labels(self) -> list[str]:
        """Return the name of each entry: ``beta[3]``, ``sd``."""
        return [
            f"{name}[{', '.join(map(str, index))}]" if index else name
            for name, shape in self.shapes.items()
            for index in np.ndindex(shape)
        ]

    def matrix(self, values: Array) -> xr.DataArray:
        """Return a covariance of the entries, labelled; of unconstrained ones as `NGVIApproximation.cov_of` does."""
        return labelled(self.labels(), values, "unconstrained" if self.unconstrained else "quantity")

    def dataset(self, vector: Array, layout: Layout, model: pm.Model) -> xr.Dataset:
        """Return one number for each entry by variable, with the dims and coords of the model."""
        values = {v.value_name: v for v in layout.variables}
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = np.split(vector, ends[:-1])
        data: dict[str, xr.DataArray] = {}
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            if name in values:
                coords = {d: layout.coords[d] for d in values[name].dims or ()}
                data[name] = xr.DataArray(part.reshape(shape), dims=dims_of(values[name]), coords=coords)
            else:
                data[name] = constrained_dataset(model, {name: part.reshape(shape)})[name]
        return xr.Dataset(data)


def _differences(
    names: Sequence[str], constrain: Constrain, at_mean: dict[str, NDArray[np.generic]], mean: Array, sd: Array
) -> dict[str, Array]:
    """Return central differences at the mean, by name, (n_entries, n_dim)."""
    n_dim = len(mean)
    results = {name: np.empty((at_mean[name].size, n_dim)) for name in names}
    size = max(1, _BATCH // (2 * sum(value.size for value in at_mean.values())))
    for start in range(0, n_dim, size):
        at = np.arange(start, min(start + size, n_dim))
        steps = np.zeros((len(at), n_dim))
        steps[np.arange(len(at)), at] = _STEP * sd[at]
        values = constrain(np.concatenate([mean + steps, mean - steps]))
        for name, result in results.items():
            flat = values[name].reshape(2 * len(at), -1).astype(np.float64)
            result[:, at] = ((flat[: len(at)] - flat[len(at) :]) / (2.0 * _STEP * sd[at, None])).T
    return results
