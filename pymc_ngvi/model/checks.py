"""What kinds of model can be fitted, and the error for each that can't."""

import pymc as pm

from pymc.distributions.simulator import SimulatorRV
from pytensor.graph.traversal import ancestors


def check_model(model: pm.Model) -> None:
    """Raise ValueError, with names and a cure, if the model can't be fitted by a continuous approximation.

    Parameters
    ----------
    model : pymc.Model

    Raises
    ------
    ValueError
        No free variable; discrete free variables; a Simulator; a Minibatch.
    """
    simulators = [rv.name for rv in model.basic_RVs if isinstance(getattr(rv.owner, "op", None), SimulatorRV)]
    if simulators:
        raise ValueError(
            f"The model has pm.Simulator variables ({_names(simulators)}), which have no log density with a gradient. "
            "Fit it with pm.sample_smc."
        )
    if not model.free_RVs:
        raise ValueError(
            f"The model has no free variables (variables: {_names(v.name for v in model.basic_RVs) or 'none'}): "
            "there is nothing to fit. Add at least one unobserved continuous variable."
        )
    discrete = [rv.name for rv in model.free_RVs if rv.dtype.startswith(("int", "uint", "bool"))]
    if discrete:
        raise ValueError(
            f"Free variables {_names(discrete)} are discrete; method 'ngvi' fits continuous variables only. Sum them "
            "out of the model (pymc_extras.marginalize, or a pm.Mixture in place of a category), or use pm.sample."
        )
    minibatches = _minibatches(model)
    if minibatches:
        raise ValueError(
            "The model reads pm.Minibatch data, for which the step rule 'adaptive' can't work: it compares ELBOs on "
            "the same data. Use the full data, which is usually fast enough, or pm.fit(method='advi')."
        )


def _minibatches(model: pm.Model) -> list[str]:
    """Return the names of the random variables of the graph that are not the model's own: Minibatch indices."""
    inputs = [model.rvs_to_values[rv] for rv in model.observed_RVs] + list(model.basic_RVs)
    return [
        str(node.op)
        for node in {var.owner for var in ancestors(inputs) if var.owner is not None}
        if type(node.op).__name__ in ("MinibatchOp", "MinibatchIndexRV")
    ]


def _names(names: object) -> str:
    return ", ".join(repr(name) for name in names)  # type: ignore[attr-defined]
