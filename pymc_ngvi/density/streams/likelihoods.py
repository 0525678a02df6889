"""Which parts of a model are about batches, and what they say of one batch: its log likelihood, not scaled."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor

from pymc.data import MinibatchOp
from pymc.logprob.basic import transformed_conditional_logp
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor import as_tensor

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.streams.batch import BatchForm
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.reading.factors import Factor


class Likelihood(NamedTuple):
    """An observed variable whose rows come in batches.

    Parameters
    ----------
    name : str
    rv : Variable
        Without its scale.
    value : Variable
    total_size : int
    """

    name: str
    rv: Variable
    value: Variable
    total_size: int


def batch_form(model: pm.Model) -> BatchForm:
    """Return what the model has in the place of batches: all of its ``pm.Data``.

    Raises
    ------
    ValueError
        Where there are none, or where there is a ``pm.Minibatch``.
    """
    values = [value for value in model.rvs_to_values.values() if value is not None]
    if any(v.owner is not None and isinstance(v.owner.op, MinibatchOp) for v in ancestors([*model.basic_RVs, *values])):
        raise ValueError(
            "The model reads pm.Minibatch data, which are all in memory, and batches are given: take one of them. With "
            "batches, put pm.Data in the place of pm.Minibatch."
        )
    data = {var.name: var.get_value(borrow=True) for var in model.data_vars if isinstance(var, SharedVariable)}
    if not data:
        raise ValueError(
            "batches are dicts of arrays for the model's pm.Data, and the model has none: write, for example, "
            "X = pm.Data('X', first_rows)."
        )
    return BatchForm({name: a.shape for name, a in data.items()}, {name: a.dtype for name, a in data.items()})


def likelihoods_of(model: pm.Model, names: Iterable[str]) -> list[Likelihood]:
    """Return the observed variables that depend on data in batches.

    Parameters
    ----------
    model : pymc.Model
    names : iterable of str
        Of the data that are in batches.

    Raises
    ------
    ValueError
        For variables that depend on these and can't be parts of a sum over batches; where there are none; for a
        ``total_size`` that is missing or no number of rows.
    """
    names = list(names)
    data, variables = {model[name] for name in names}, set(model.basic_RVs)
    free = [rv.name for rv in model.free_RVs if _depends(rv.owner.inputs, data, variables)]
    if free:
        raise ValueError(
            f"Free variables {quoted(free)} depend on data in batches ({quoted(names)}): each batch would have another "
            "prior, or other variables. Let only observed variables depend on these."
        )
    potentials = [term.name for term in model.potentials if _depends([term], data, variables)]
    if potentials:
        raise ValueError(
            f"Potentials {quoted(potentials)} depend on data in batches ({quoted(names)}), and have no total_size: "
            "write them as observed variables (pm.CustomDist)."
        )
    found = [rv for rv in model.observed_RVs if _depends([*rv.owner.inputs, model.rvs_to_values[rv]], data, variables)]
    if not found:
        raise ValueError(f"No observed variable depends on the data in batches ({quoted(names)}).")
    fixed = [rv.name for rv in found if not _depends([model.rvs_to_values[rv]], data, variables)]
    if fixed:
        raise ValueError(
            f"The observed values of {quoted(fixed)} are not in the batches, which have {quoted(names)}: make them "
            "pm.Data, and give them in each batch."
        )
    return [Likelihood(rv.name, rv.owner.inputs[0], model.rvs_to_values[rv], _total_size(rv)) for rv in found]


def _total_size(rv: Any) -> int:
    if not isinstance(rv.owner.op, MinibatchRandomVariable):
        raise ValueError(
            f"{rv.name!r} depends on data in batches and has no total_size: give it total_size=, the number of rows of "
            "all batches together."
        )
    first, *others = rv.owner.inputs[1:]
    known = [size for size in others if not _is_none(size)]
    if _is_none(first) or known or not rv.type.ndim:
        raise ValueError(
            f"total_size of {rv.name!r} should be one number, of the rows of all batches together; batches are along "
            "the first axis."
        )
    return int(np.asarray(first.data if isinstance(first, Constant) else first.eval()))


def _is_none(size: Any) -> bool:
    return isinstance(size, Constant) and size.data is None


def _depends(inputs: list[Variable], data: set[Variable], variables: set[Variable]) -> bool:
    """Tell whether data enter, other than through random variables."""

    def expand(var: Variable) -> list[Variable] | None:
        return None if var.owner is None or var in variables else list(var.owner.inputs)

    return any(var in data for var in walk(inputs, expand))


class BatchLikelihood:
    """The log likelihood of a batch, which may be replaced by others of the same shapes.

    Parameters
    ----------
    model : pymc.Model
        Its own data stay what they are.
    likelihoods : list of Likelihood
    arrays : mapping
        The batch.

    Attributes
    ----------
    log_p : LogDensity
    """

    def __init__(self, model: pm.Model, likelihoods: list[Likelihood], arrays: Mapping[str, AnyArray]) -> None:
        self._likelihoods = likelihoods
        self._data: dict[str, Any] = {
            name: pytensor.shared(array, name, shape=model[name].type.shape, borrow=True)
            for name, array in arrays.items()
        }
        self.log_p = LogDensity(model, factors=self._factors_of)

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        values = {rv: model.rvs_to_values[rv] for rv in model.free_RVs}
        observed = {part.rv: part.value for part in self._likelihoods}
        transforms = {**model.rvs_to_transforms, **dict.fromkeys(observed)}
        logps = transformed_conditional_logp(
            list(observed), rvs_to_values={**values, **observed}, rvs_to_transforms=transforms
        )
        lengths = [part.value.shape[0] for part in self._likelihoods]
        own = {model[name]: var for name, var in self._data.items()}
        logps, lengths = (graph_replace(outputs, own, strict=False) for outputs in (logps, lengths))
        with without_c():
            self._lengths = pytensor.function([], lengths, mode=quick_mode())
        logps = [as_tensor(logp, allow_xtensor_conversion=True) for logp in logps]
        return tuple(Factor(part.rv, "observed", logp) for part, logp in zip(self._likelihoods, logps, strict=True))

    @property
    def rows(self) -> Expectations:
        """Those that it is a sum over."""
        assert self.log_p.rows is not None
        return self.log_p.rows

    @property
    def n_rows(self) -> list[int]:
        """Rows of the batch, by likelihood."""
        return [int(n) for n in self._lengths()]

    def take(self, arrays: Mapping[str, AnyArray]) -> None:
        """Go to another batch."""
        for name, array in arrays.items():
            self._data[name].set_value(array, borrow=True)
