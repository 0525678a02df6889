"""Whether exp(log p) of a model has the marginal likelihood as its integral: which terms stand against it."""

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.custom import CustomDistRV
from pymc.distributions.multivariate import ICARRV, LKJCorrRV, _LKJCholeskyCovRV
from pymc.distributions.transforms import Ordered
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op
from scipy.special import betaln

from pymc_ngvi.graphs.layout import Layout

# --- which coordinates have no proper prior: a posterior can be improper only through these ---


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
    of_priors += [_unknown_constant(rv) for rv in model.free_RVs if _is_lkj(rv)]
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


def log_excess(model: pm.Model) -> float:
    """Return the logarithm of what the prior integrates to where PyMC's constants are off, 0 where they are not.

    The constant of LKJ priors has the wrong sign in versions of PyMC: it is compared with the integral [1]_.

    References
    ----------
    .. [1] D. Lewandowski, D. Kurowicka, H. Joe (2009). Generating random correlation matrices based on vines and
       extended onion method. Journal of Multivariate Analysis 100(9). https://doi.org/10.1016/j.jmva.2009.04.008
    """
    total = 0.0
    for rv in model.free_RVs:
        if _is_lkj(rv):
            n, eta = (v.eval().item() for v in _lkj_parameters(rv))
            n_matrices = int(np.prod(rv.shape[:-2].eval())) if isinstance(rv.owner.op, LKJCorrRV) else 1
            constant = float(pm.logp(pm.LKJCorr.dist(n=n, eta=eta), np.eye(n)).eval())
            total += n_matrices * (constant + log_lkj_integral(int(n), eta))
    return total


def log_lkj_integral(n: int, eta: float) -> float:
    """Return the log of the integral of det(R)^(eta - 1) over correlation matrices of n variables."""
    k = np.arange(1, n)
    log_beta = betaln(eta + (n - k - 1) / 2.0, eta + (n - k - 1) / 2.0)
    return float(np.sum((n - k) * ((2.0 * eta - 2.0 + n - k) * np.log(2.0) + log_beta)))


def _is_lkj(rv: Variable) -> bool:
    return isinstance(rv.owner.op, LKJCorrRV | _LKJCholeskyCovRV)


def _unknown_constant(rv: Variable) -> str:
    """Return why an LKJ prior has no constant that is known, in a clause; empty where it has one."""
    n, eta = _lkj_parameters(rv)
    if not isinstance(eta, Constant):
        return f"the LKJ prior of {rv.name!r} has an eta that is not constant"
    # PyMC's density there is one of Cholesky factors, without the change of volume to correlations.
    if isinstance(rv.owner.op, LKJCorrRV) and n.eval() > 2:
        return f"the density of the LKJCorr prior of {rv.name!r} is not that of correlations, in PyMC"
    return ""


def _lkj_parameters(rv: Variable) -> list[Variable]:
    """Return n and eta."""
    inputs: list[Variable] = rv.owner.inputs
    return inputs[2:4] if isinstance(rv.owner.op, LKJCorrRV) else inputs[1:3]
