"""Whether exp(log p) of a model has the marginal likelihood as its integral: which terms stand against it."""

import pymc as pm

from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.multivariate import ICARRV
from pymc.distributions.transforms import Ordered
from pytensor.graph.basic import Variable

#: What marks a term that the user says is normalised.
_MARK = "pymc_ngvi_normalised"


def normalised(term: Variable) -> Variable:
    """Declare that a Potential, or a variable with an ordering transform, leaves the prior a density.

    Its exponential, times the rest of the prior, has to integrate to 1 over the parameters; only then does
    `NGVIApproximation.log_marginal_likelihood` mean anything.

    Parameters
    ----------
    term : pytensor variable
        What ``pm.Potential`` or a distribution has returned.

    Returns
    -------
    pytensor variable
        The same.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x")
    ...     _ = pymc_ngvi.normalised(pm.Potential("shift", 0.0 * x))
    """
    setattr(term.tag, _MARK, True)
    return term


def unnormalised(model: pm.Model) -> list[str]:
    """Return why exp(log p) is not the joint density of parameters and data, a clause for each term; often empty."""
    reasons = []
    for rv in model.free_RVs:
        if getattr(rv.tag, _MARK, False):
            continue
        op = rv.owner.op
        if isinstance(op, FlatRV | HalfFlatRV):
            reasons.append(f"the prior of {rv.name!r} is improper")
        elif isinstance(op, ICARRV):
            reasons.append(f"the ICAR prior of {rv.name!r} has no normalising constant")
        elif isinstance(model.rvs_to_transforms.get(rv), Ordered):
            reasons.append(f"the ordering of {rv.name!r} leaves out a part of its prior that is not made up for")
    for term in model.potentials:
        if not getattr(term.tag, _MARK, False):
            reasons.append(
                f"the Potential {term.name!r} may have any scale (pymc_ngvi.normalised(...) around it says otherwise)"
            )
    return reasons
