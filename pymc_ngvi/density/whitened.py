"""The model in coordinates whitened by a Gaussian: a PyMC model of one vector, for samplers of others."""

import pymc as pm
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density.model_density import ModelDensity
from pymc_ngvi.graphs.layout import Variable as Place
from pymc_ngvi.graphs.linear_maps import held, mapped
from pymc_ngvi.graphs.triangles import serve_jax

__all__ = ["LOG_P", "WHITENED", "serve_jax", "whitened_model"]

#: The free variable of the whitened model, and the Potential that is its log density.
WHITENED, LOG_P = "whitened", "log_p"


def whitened_model(density: ModelDensity, gaussian: GaussianState) -> pm.Model:
    """Return a model of z, (n_dim,), whose log density is log p at mean + C z, up to the constant log determinant of C.

    Parameters
    ----------
    density : ModelDensity
        With all of the data here.
    gaussian : GaussianState
        Of the mean and of C.

    Raises
    ------
    ValueError
        Where the model has other free variables than when it was fitted.
    """
    model, layout = density.model, density.layout
    values = {value.name: value for value in model.value_vars}
    known = {place.value_name for place in layout.variables}
    if others := sorted(known ^ values.keys()):
        raise ValueError(
            f"The free variables of the model are others than those of the fit: {', '.join(others)}. Fit again."
        )
    logp = model.logp()
    with pm.Model(check_bounds=model.check_bounds, model=None) as whitened:
        z = pm.Flat(WHITENED, shape=density.n_dim)
        theta = held(gaussian.mean()) + mapped(gaussian.maps(), pt.cast(z, "float64"))
        places = [(values[place.value_name], place) for place in layout.variables]
        pieces = {value: _piece(theta, place, value) for value, place in places}
        pm.Potential(LOG_P, graph_replace(logp, pieces, strict=False))
    return whitened


def _piece(theta: Variable, place: Place, value: Variable) -> Variable:
    """Return what stands for a value variable in the flat vector."""
    piece = pt.cast(theta[place.where].reshape(place.shape), value.type.dtype)
    return as_xtensor(piece, dims=value.type.dims) if isinstance(value.type, XTensorType) else piece
