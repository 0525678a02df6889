"""From a model and a word to the reparametrised density."""

from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.conditional import GuideFunctions
from pymc_ngvi.density.guide import quadratic_guide
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.reading.factors import logp_of
from pymc_ngvi.reparam.target import ReparametrisedDensity
from pymc_ngvi.reparam.transform import Conditional


def reparametrised(density: LogDensity, structure: ArrowStructure, reparam: str) -> ReparametrisedDensity:
    """Return the log density of a model with its local coordinates relative to their conditional modes.

    Parameters
    ----------
    density : LogDensity
    structure : ArrowStructure
        Of the Hessian of log p: which coordinates are local, and their blocks.
    reparam : {"rvb1", "rvb2", "noncentred"}
        The modes are those of a quadratic approximation from the data, of log p itself, or of the prior alone.

    Returns
    -------
    ReparametrisedDensity

    Raises
    ------
    ValueError
        If there are no local coordinates; if the model reads ``pm.Minibatch`` data; for "rvb1", if an observed variable
        is not Poisson, Bernoulli or Normal with its canonical link.
    MissingDerivativeError
        If an operation has no third derivative (a ValueError).
    """
    if density.has_minibatch:
        raise ValueError(
            f"The model reads pm.Minibatch data; reparam={reparam!r} needs conditional modes given all of the data. "
            "Pass the data as they are, or leave reparam out."
        )
    if not structure.n_local:
        raise ValueError(
            f"reparam={reparam!r} standardises local coordinates, such as the effects of groups that are independent "
            "given the others; the Hessian of this model shows none. Leave reparam out."
        )
    guide = None
    if reparam == "rvb1":
        guide = quadratic_guide(density, structure)
    elif reparam == "noncentred":
        guide = logp_of([factor for factor in density.graphs.factors if factor.role != "observed"])
    transform = Conditional(GuideFunctions(density, structure, guide), structure, density.initial_point())
    return ReparametrisedDensity(density, transform)
