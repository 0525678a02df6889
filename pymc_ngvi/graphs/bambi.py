"""What tells the parameters of a Bambi model from those of its PyMC model.

Bambi subtracts the column means of the predictors before it builds the PyMC model, whose intercept is therefore the
linear predictor at mean predictors. It moves draws of NUTS to predictors of zero, but not the results of ``pm.fit``.
"""

import gc
import sys

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm

from pymc_ngvi.core.messages import warn
from pymc_ngvi.core.types import AnyArray, Array

#: The dim that Bambi gives to the rows of its data.
OBS = "__obs__"
#: Attribute of a PyMC model that holds its `BambiParameters`.
ATTRIBUTE = "_pymc_ngvi_bambi"


@dataclass(frozen=True, eq=False)
class BambiParameters:
    """The parameters of a Bambi model, as functions of the variables of its PyMC model."""

    #: By the names of intercepts: the coefficients of centred predictors, and the means of the columns of these.
    centrings: Mapping[str, tuple[Sequence[str], Array]] = field(default_factory=dict)
    #: Variables that Bambi's own results leave out: the raw effects of groups, and parameters of the rows.
    left_out: frozenset[str] = frozenset()
    #: The Bambi model, and the rows of its data; None where this comes from a pickle.
    spec: Any = field(default=None, repr=False)
    data: Any = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, and copy, without the Bambi model."""
        return BambiParameters, (self.centrings, self.left_out)

    def uncentred(self, values: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Return values of variables, (n_draws, *shape), with intercepts at predictors of zero.

        Intercepts whose coefficients are not all there stay as they are.
        """
        result = dict(values)
        for intercept, (coefficients, means) in self.centrings.items():
            if {intercept, *coefficients} <= values.keys():
                centred = values[intercept]
                # Columns come first among the axes of a coefficient, classes of the response last.
                columns = [values[k].reshape(len(centred), -1, *centred.shape[1:]) for k in coefficients]
                shift = np.einsum("np...,p->n...", np.concatenate(columns, axis=1), means)
                result[intercept] = (centred - shift).astype(centred.dtype, copy=False)
        return result


def bambi_parameters(model: pm.Model) -> BambiParameters:
    """Return what is known of the Bambi model that built a PyMC model; without parameters where none did."""
    if not hasattr(model, ATTRIBUTE):
        setattr(model, ATTRIBUTE, _found(model) if OBS in model.coords else BambiParameters())
    known: BambiParameters = getattr(model, ATTRIBUTE)
    return known


def _found(model: pm.Model) -> BambiParameters:
    """Look for the Bambi model among the objects that refer to a PyMC model: it is nowhere written in the latter."""
    bambi = sys.modules.get("bambi")
    for referrer in gc.get_referrers(model):  # 20 ms among 280,000 objects
        backend = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", {})
        spec = backend.get("spec")
        if bambi is None or not isinstance(spec, bambi.Model) or backend.get("components") is None:
            continue  # its backend, which refers to both, has what it centred
        centrings = {}
        for part in backend["components"].values():
            design = getattr(part, "design_matrix_without_intercept", None)  # None where nothing is centred
            if design is not None:
                terms = [term.alias or term.name for term in part.component.common_terms.values()]
                intercept = part.component.intercept_term
                means = np.asarray(design, dtype=np.float64).mean(axis=0)
                centrings[intercept.alias or intercept.name] = terms, means
        of_rows = {d.name for d in model.deterministics} & {*spec.family.likelihood.params}
        raw = {name for name in model.named_vars if name.endswith("_offset")}
        data = spec._response_component.response.data
        return BambiParameters(centrings, frozenset(of_rows | raw), spec, data)
    warn(
        "The Bambi model of this PyMC model was not found: one of them is a copy, or was deleted. Intercepts are "
        "therefore those at mean predictors, not at predictors of zero. Fit with bambi_model.fit("
        'inference_method="vi", method="ngvi").'
    )
    return BambiParameters()
