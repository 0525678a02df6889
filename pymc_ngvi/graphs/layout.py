"""Where each variable lives in the flat unconstrained vector: names, order, shapes, dims, frozen once."""

from dataclasses import dataclass, field

import numpy as np
import pymc as pm

from numpy.typing import NDArray

from pymc_ngvi.core.types import AnyArray, Indices
from pymc_ngvi.graphs.bambi import BambiParameters, bambi_parameters


@dataclass(frozen=True)
class Variable:
    """One free variable.

    Parameters
    ----------
    name : str
        Of the random variable.
    value_name : str
        Of its unconstrained value variable (``sd_log__`` for ``sd``).
    shape : tuple of int
        Unconstrained.
    where : slice
        Its entries in the flat vector, in C order.
    dims : tuple of str, or None
        Named dimensions, where the unconstrained shape is the constrained one.
    """

    name: str
    value_name: str
    shape: tuple[int, ...]
    where: slice
    dims: tuple[str, ...] | None

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.where.stop - self.where.start)


@dataclass(frozen=True)
class Layout:
    """The free variables of a model, in the order of ``model.value_vars``.

    Parameters
    ----------
    variables : tuple of Variable
    coords : dict
        Coordinate values of every named dimension of the model.
    bambi : BambiParameters
        Of the Bambi model that built the model, if one did.
    """

    variables: tuple[Variable, ...]
    coords: dict[str, AnyArray]
    bambi: BambiParameters = field(default_factory=BambiParameters)

    @classmethod
    def from_model(cls, model: pm.Model, point: dict[str, AnyArray]) -> "Layout":
        """Freeze the layout of ``model``; ``point`` is an initial point, of which only the shapes count."""
        variables, start = [], 0
        for value in model.value_vars:
            rv = model.values_to_rvs[value]
            shape = tuple(np.shape(point[value.name]))
            size = int(np.prod(shape, dtype=int))
            dims = model.named_vars_to_dims.get(rv.name)
            lengths = [None if d is None else len(_coord(model, d)) for d in dims or ()]
            named = bool(dims) and None not in dims and tuple(lengths) == shape
            variables.append(
                Variable(rv.name, value.name, shape, slice(start, start + size), tuple(dims) if named else None)
            )
            start += size
        coords = {d: _coord(model, d) for d in model.coords}
        return cls(tuple(variables), coords, bambi_parameters(model))

    @property
    def n_dim(self) -> int:
        """Length of the flat vector."""
        return self.variables[-1].where.stop if self.variables else 0

    def flatten(self, point: dict[str, AnyArray]) -> NDArray[np.float64]:
        """Join unconstrained values, by value name, to the flat vector."""
        parts = [np.ravel(np.asarray(point[v.value_name], dtype=np.float64)) for v in self.variables]
        return np.concatenate(parts) if parts else np.empty(0)

    def unflatten(self, theta: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Split vectors, (..., n_dim), to unconstrained values by value name, (..., *shape)."""
        lead = theta.shape[:-1]
        return {v.value_name: theta[..., v.where].reshape(lead + v.shape) for v in self.variables}

    def coordinates(self, name: str) -> Indices | None:
        """Return the flat coordinates of a variable, of its value, or of a label; None where none is called so."""
        owner = next((v for v in self.variables if name in (v.name, v.value_name)), None)
        if owner is not None:
            return np.arange(owner.where.start, owner.where.stop)
        inside = (v for v in self.variables if v.value_name == name.rpartition("[")[0])
        places = (i for v in inside for i in range(v.where.start, v.where.stop))
        found = [i for i in places if self.label(i).replace(" ", "") == name.replace(" ", "")]
        return np.array(found, dtype=np.intp) if found else None

    def label(self, index: int) -> str:
        """Return the name of one flat coordinate: ``beta[3]``, ``sd_log__[0]``."""
        for v in self.variables:
            if v.where.start <= index < v.where.stop:
                if not v.shape:
                    return v.value_name
                position = np.unravel_index(index - v.where.start, v.shape)
                return f"{v.value_name}[{', '.join(str(int(i)) for i in position)}]"
        raise IndexError(f"coordinate {index} is outside 0..{self.n_dim - 1}")


def _coord(model: pm.Model, dim: str) -> AnyArray:
    values = model.coords.get(dim)
    if values is None:
        return np.arange(int(model.dim_lengths[dim].eval()))
    return np.asarray(values)
