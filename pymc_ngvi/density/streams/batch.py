"""What a model takes of a batch: arrays for its data, of the right names, shapes and types."""

import hashlib

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.streams.errors import BatchError

#: Rows whose values tell batches apart.
_N_PRINTED = 512


@dataclass(frozen=True)
class BatchForm:
    """What a model needs of each batch.

    Parameters
    ----------
    shapes : dict
        Of the data in the model, by name.
    dtypes : dict
    names : tuple of str
        Of those that a batch has.
    by_row : tuple of str
        Of those whose first axis is that of the rows.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype[Any]]
    names: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()

    def arrays(self, data: Any, where: str) -> dict[str, AnyArray]:
        """Return the arrays of a batch.

        Parameters
        ----------
        data : mapping, or array where the model has one ``pm.Data``
        where : str
            The batch, for messages.

        Raises
        ------
        BatchError
            Where they are not what the model needs, saying which, what was given, and what is needed.
        """
        arrays = {name: self._array(name, value, where) for name, value in self._named(data, where).items()}
        lengths = {name: len(arrays[name]) for name in self.by_row if name in arrays}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} {n}" for name, n in lengths.items())
            raise BatchError(f"{where} has arrays with different numbers of rows: {listed}.")
        if lengths and not min(lengths.values()):
            raise BatchError(f"{where} is empty: it has no rows. Leave it out.")
        return arrays

    def _named(self, data: Any, where: str) -> Mapping[str, Any]:
        if isinstance(data, np.ndarray) and len(self.shapes) == 1:
            data = {next(iter(self.shapes)): data}
        if not isinstance(data, Mapping):
            names = quoted(self.names or self.shapes)
            raise BatchError(
                f"{where} is a {type(data).__name__}; it should be a dict of arrays with the names of the model's "
                f"pm.Data ({names})."
            )
        unknown = [name for name in data if name not in self.shapes]
        if unknown:
            raise BatchError(
                f"{where} has {unknown[0]!r}, which is no pm.Data of the model: "
                f"{suggestion(unknown[0], list(self.shapes))}"
            )
        missing = [name for name in self.names if name not in data]
        if missing:
            raise BatchError(f"{where} lacks {quoted(missing)}; it has {quoted(data) or 'nothing'}.")
        extra = [name for name in data if self.names and name not in self.names]
        if extra:
            raise BatchError(f"{where} has {quoted(extra)}, which the first batch has not.")
        return data

    def _array(self, name: str, value: Any, where: str) -> AnyArray:
        array, own = np.asarray(value), self.shapes[name]
        if array.ndim != len(own) or array.shape[1:] != own[1:]:
            wanted = ", ".join(["rows", *map(str, own[1:])]) if own else ""
            raise BatchError(f"{where} has {name!r} of shape {array.shape}; the model's pm.Data has ({wanted}).")
        if array.dtype.kind not in "biuf":
            raise BatchError(
                f"{where} has {name!r} of type {array.dtype}; the model's pm.Data has {self.dtypes[name]}."
            )
        if array.dtype.kind == "f" and (bad := np.isnan(array)).any():
            row = int(np.argwhere(bad)[0][0]) if array.ndim else 0
            raise BatchError(
                f"{where} has {int(bad.sum())} NaN in {name!r}, the first in row {row}. Leave these rows out, or fill "
                "in what is missing."
            )
        converted = array.astype(self.dtypes[name], order="C")
        if array.dtype.kind == "f" and converted.dtype.kind != "f" and not np.array_equal(converted, array):
            raise BatchError(
                f"{where} has {name!r} with fractions; the model's pm.Data has {self.dtypes[name]}: make it float."
            )
        return converted


def print_of(arrays: Mapping[str, AnyArray]) -> str:
    """Return what tells a batch from others: of its shapes, and of its first rows."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array[:_N_PRINTED]).tobytes() if array.ndim else array.tobytes())
    return digest.hexdigest()
