"""Which coordinates have no proper prior: a posterior can be improper only through these."""

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.custom import CustomDistRV
from pymc.distributions.multivariate import ICARRV

from pymc_ngvi.graphs.layout import Layout


def flat_coordinates(model: pm.Model, layout: Layout) -> NDArray[np.intp]:
    """Return the coordinates of ``pm.Flat`` and ``pm.HalfFlat``."""
    found = [np.arange(v.where.start, v.where.stop) for v in layout.variables if _is(model, v.name, FlatRV, HalfFlatRV)]
    return np.concatenate(found) if found else np.empty(0, dtype=np.intp)


def has_proper_priors(model: pm.Model) -> bool:
    """Tell whether every free variable has a density that integrates to 1, so that the posterior is proper.

    What is not known to be so, Potentials and densities of the user's own, counts as improper.
    """
    names = [rv.name for rv in model.free_RVs]
    return not (model.potentials or any(_is(model, name, FlatRV, HalfFlatRV, CustomDistRV, ICARRV) for name in names))


def _is(model: pm.Model, name: str, *kinds: type) -> bool:
    return isinstance(getattr(model[name].owner, "op", None), kinds)
