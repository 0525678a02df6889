"""The components of a mixture as arrays of xarray."""

import numpy as np
import xarray as xr

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.families import MixtureState
from pymc_ngvi.results.convert import Labels, flat_dataset, free_names


def components_dataset(mixture: MixtureState, layout: Layout) -> xr.Dataset:
    """Return weights, means and standard deviations of components, unconstrained."""
    component, moment, weights = names_of(layout)
    leading: dict[str, Labels] = {component: np.arange(mixture.n_components), moment: ["mean", "sd"]}
    moments = np.stack([mixture.means, mixture.sds], axis=1)
    shares = xr.DataArray(mixture.weights, dims=component, coords={component: leading[component]})
    return flat_dataset(layout, moments, leading).assign({weights: shares})


def names_of(layout: Layout) -> list[str]:
    """Return the names of the dims of components and of moments, and of the weights, apart from those of the model."""
    return free_names(layout, "component", "moment", "weights")


def weights_by_component(mixture: MixtureState, layout: Layout) -> xr.DataArray:
    """Return the weights of the components."""
    dim = names_of(layout)[0]
    return xr.DataArray(mixture.weights, coords={dim: np.arange(mixture.n_components)}, dims=dim, name="weights")


def responsibilities(mixture: MixtureState, layout: Layout, theta: Array) -> xr.DataArray:
    """Return the probability that each draw belongs to each component, (n_draws, n_components)."""
    if theta.ndim != 2 or theta.shape[1] != mixture.n_dim:
        raise ValueError(
            f"draws should be unconstrained, of shape (n_draws, {mixture.n_dim}), such as draw_flat(n) returns; "
            f"got {theta.shape}."
        )
    coords = {"draw": np.arange(len(theta)), names_of(layout)[0]: np.arange(mixture.n_components)}
    return xr.DataArray(mixture.responsibilities(theta), coords=coords, dims=list(coords), name="responsibilities")
