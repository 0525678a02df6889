"""An approximation as a tree of xarray, in a file, and pickled."""

import copy
import os
import pickle

from dataclasses import fields
from typing import Any, Self

import cloudpickle
import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.persistence import files
from pymc_ngvi.results.persistence.matching import SavedData
from pymc_ngvi.results.persistence.trees import add_to_tree, resumable_fit
from pymc_ngvi.results.sampling import Sampling, sample_tree


class SavingMethods(Fitted):
    """Files and pickles. A pickle is always made by cloudpickle, and holds what the fit needs to go on."""

    def to_datatree(
        self, draws: int = 0, *, random_seed: Seed = None, resumable: bool = True, **kwargs: Any
    ) -> xr.DataTree:
        """Return the approximation as a tree, from which `pymc_ngvi.load` restores it.

        Parameters
        ----------
        draws : int, default 0
            Posterior draws to add, as groups ``posterior``, ``sample_stats``, ``observed_data``, ... like those of
            `sample`.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of these draws.
        resumable : bool, default True
            Keep the state of the fit, for `refine`. Without it the tree is smaller, by a factor that grows with the
            number of draws that the fit ended with.
        **kwargs
            Of `sample`.

        Returns
        -------
        xarray.DataTree
            Group ``approximation`` holds the arrays of q (unconstrained, flat) and, as JSON, the names, shapes, dims,
            coords and transforms of the free variables, the record of the fit and digests of the data; ``fit`` the
            state of the fit; ``unconstrained`` mean and standard deviations by variable. Attributes of the root say
            the versions.

        Raises
        ------
        ValueError
            Where ``pm.set_data`` changed the data after the fit.
        TypeError
            For a q of a class that is not of this package.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", 1.0, 2.0)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> tree = approx.to_datatree(draws=100)
        >>> dict(tree["posterior"].sizes)
        {'chain': 1, 'draw': 100}
        >>> tree["unconstrained/x"].values.round(6)
        array([1., 2.])
        """
        if not isinstance(self._data, SavedData):
            self.refuse_changed_data("Saved, the approximation would go with data that it was not fitted to")
        tree = xr.DataTree()
        if draws:
            sample = {f.name: kwargs.pop(f.name) for f in fields(Sampling) if f.name in kwargs}
            kwargs.pop("return_inferencedata", None)
            rng, how = self.generator(random_seed), Sampling(**sample)
            tree = sample_tree(self._posterior, self._kept, draws, rng, how, **kwargs)
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} are of posterior draws: ask for draws, too.")
        return add_to_tree(tree, self, resumable=resumable)

    def save(
        self,
        path: str | os.PathLike[str],
        draws: int = 0,
        *,
        random_seed: Seed = None,
        resumable: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write the approximation to a file, from which `pymc_ngvi.load` reads it.

        A file of that name is replaced, once the new one is complete; if writing fails, it is kept as it is.

        Parameters
        ----------
        path : str or PathLike
            Ends in ``.nc``, ``.nc4``, ``.netcdf`` or ``.h5`` (netCDF-4), or in ``.zarr`` (zarr, a folder; needs the
            package).
        draws, random_seed, resumable, **kwargs
            As of `to_datatree`.

        Raises
        ------
        ValueError
            For another suffix.
        ImportError
            For zarr, where it is not installed.
        FileNotFoundError, FileExistsError
            If the folder does not exist; if there is something that is no file (no zarr store) to be replaced.
        """
        checked = files.check_path(path)
        tree = self.to_datatree(draws, random_seed=random_seed, resumable=resumable, **kwargs)
        files.write(tree, checked)

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle; of the fit, what it needs to go on."""
        state: Any = super().__getstate__()
        return {**state, "_session": resumable_fit(self)}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a pickle by cloudpickle: PyMC's models hold functions that pickle itself can't take."""
        return pickle.loads, (cloudpickle.dumps(self, protocol),)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let cloudpickle take instances apart: a model stays one where it is pickled beside its approximations."""
        super().__init_subclass__(**kwargs)
        cloudpickle.CloudPickler.dispatch_table[cls] = _parts

    def __copy__(self) -> Self:
        """Return an approximation that shares all parts but the fit."""
        copied = _bare(type(self))
        copied.__dict__.update(self.__dict__, _session=None, _reports=copy.copy(self._reports))
        if copied._gaussian is not None:
            copied._gaussian = copy.copy(copied._gaussian)
        return copied


def _parts(approx: SavingMethods) -> tuple[Any, ...]:
    return _bare, (type(approx),), approx.__getstate__()


def _bare[T](cls: type[T]) -> T:
    return cls.__new__(cls)
