"""Whether exp(log p) of a model has the marginal likelihood as its integral: which terms stand against it."""

import pymc as pm

from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.multivariate import ICARRV
from pymc.distributions.transforms import Ordered
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Variable
from pytensor.graph.op import Op

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


def copy_marks(model: pm.Model, other: pm.Model) -> None:
    """Declare in a copy of a model what was declared in it."""
    for term in (*model.free_RVs, *model.potentials):
        if getattr(term.tag, _MARK, False):
            normalised(other[term.name])


def unnormalised(model: pm.Model) -> list[str]:
    """Return why exp(log p) is not the joint density of parameters and data, a clause for each term; often empty."""
    transforms = model.rvs_to_transforms
    of_priors = [
        unnormalised_prior(rv.name, rv.owner.op, transforms.get(rv))
        for rv in model.free_RVs
        if not getattr(rv.tag, _MARK, False)
    ]
    reasons = [reason for reason in of_priors if reason]
    for term in model.potentials:
        if not getattr(term.tag, _MARK, False):
            reasons.append(
                f"the Potential {term.name!r} may have any scale (pymc_ngvi.normalised(...) around it says otherwise)"
            )
    return reasons


def unnormalised_prior(name: str, op: Op, transform: Transform | None) -> str:
    """Return why the prior of a variable is no density that integrates to 1, in a clause; empty where it is one."""
    if isinstance(op, FlatRV | HalfFlatRV):
        return f"the prior of {name!r} is improper"
    if isinstance(op, ICARRV):
        return f"the ICAR prior of {name!r} has no normalising constant"
    if isinstance(transform, Ordered):
        return f"the ordering of {name!r} leaves out a part of its prior that is not made up for"
    return ""
