"""The components of a mixture as an xarray Dataset."""

import numpy as np
import xarray as xr

from pymc_ngvi.families import MixtureState
from pymc_ngvi.model import Layout
from pymc_ngvi.results.convert import dims_of, flat_dataset


def components_dataset(mixture: MixtureState, layout: Layout) -> xr.Dataset:
    """Return weights, means and standard deviations of components, unconstrained.

    Parameters
    ----------
    mixture : MixtureState
    layout : Layout

    Returns
    -------
    xarray.Dataset
        By value name (``sd_log__``), with dims ``component``, ``moment`` ("mean", "sd") and those of the variable;
        ``weights`` by component. A name that the model has taken itself gets ``q_`` before it.
    """
    component, moment, weights = names_of(layout)
    leading = {component: np.arange(mixture.n_components), moment: ["mean", "sd"]}
    moments = np.stack([mixture.means, mixture.sds], axis=1)
    shares = xr.DataArray(mixture.weights, dims=component, coords={component: leading[component]})
    return flat_dataset(layout, moments, leading).assign({weights: shares})


def names_of(layout: Layout) -> list[str]:
    """Return the names of the dims of components and of moments, and of the weights, apart from those of the model."""
    taken = {v.value_name for v in layout.variables}.union(*(dims_of(v) for v in layout.variables))
    return [f"q_{name}" if name in taken else name for name in ("component", "moment", "weights")]
