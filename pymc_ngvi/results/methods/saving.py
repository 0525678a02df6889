"""An approximation as a tree of xarray, and in a file."""

import os

from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.saved import SavedFit
from pymc_ngvi.results.convert import flat_dataset
from pymc_ngvi.results.methods.fit import FitReport
from pymc_ngvi.results.persistence import files
from pymc_ngvi.results.persistence.content import (
    APPROXIMATION,
    FIT,
    UNCONSTRAINED,
    content_of_generator,
    content_of_q,
    damaged,
    group_of,
    readable,
    versions,
)
from pymc_ngvi.results.persistence.matching import SavedData, fingerprints, free_variables
from pymc_ngvi.results.persistence.pickling import Pickled
from pymc_ngvi.results.persistence.verdicts import content_of_diagnosis, diagnosis_of


class Persistent(Pickled, FitReport):
    """The part of an approximation that goes to files."""

    record: FitRecord | None
    hist: NDArray[Any]
    gap_hist: NDArray[Any]

    def to_datatree(
        self, draws: int = 0, *, random_seed: Any = None, resumable: bool = True, **kwargs: Any
    ) -> xr.DataTree:
        """Return the approximation as a tree, which `pymc_ngvi.load` makes one of again.

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
            tree = self.sample(draws, random_seed=random_seed, **{**kwargs, "return_inferencedata": True})
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} are of posterior draws: ask for draws, too.")
        fitted = self.gaussian
        snapshot = fitted._session.snapshot() if resumable and fitted._session is not None else None
        tree[APPROXIMATION] = xr.DataTree(group_of(self._content(), inline=False, attrs=readable(self)))
        if snapshot is not None:
            tree[FIT] = xr.DataTree(group_of({"snapshot": snapshot, "log_p": fitted._log_p_at_mean()}, inline=True))
        moments = np.stack([self._distribution.mean(), self._distribution.sd()])
        tree[UNCONSTRAINED] = xr.DataTree(flat_dataset(self.layout, moments, {"moment": ["mean", "sd"]}))
        tree.attrs |= versions()
        return tree

    def save(
        self,
        path: str | os.PathLike[str],
        draws: int = 0,
        *,
        random_seed: Any = None,
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

    def _content(self) -> dict[str, Any]:
        content = {
            **self._content_of_fit(),
            "variables": free_variables(self.model, self.layout),
            "data": self._data.saved if isinstance(self._data, SavedData) else fingerprints(self.model),
            "backend": self.density.backend,
        }
        if self._exact_step is not None:
            content |= {"gaussian": self.gaussian._content_of_fit(), "exact_step": self._exact_step}
        return content

    def _content_of_fit(self) -> dict[str, Any]:
        judged = self._judged()
        return {
            "q": content_of_q(self._state, self.record),
            "record": self.record,
            "diagnosis": None if judged is None else content_of_diagnosis(judged[0]),
            "share": None if judged is None else judged[1],
            "hist": self.hist,
            "gap_hist": self.gap_hist,
            "generator": content_of_generator(self._rng),
            "include_transformed": self.include_transformed,
        }

    def _resumable(self) -> SavedFit | None:
        """Return what the fit needs to go on, without what can be made again."""
        if self._session is None or (isinstance(self._session, SavedFit) and self._session.is_idle):
            return self._session
        return SavedFit(self.density, self._state, self._session.snapshot(), self._log_p_at_mean())

    def _log_p_at_mean(self) -> float | None:
        """Return log p at the mean of q, which tells models apart that differ in a prior; None for minibatches."""
        if isinstance(self._session, SavedFit) and self._session.is_idle:
            return self._session.log_p
        if self.density.has_minibatch or self._data.changed():
            return None
        return float(self.log_p(self._distribution.mean()[None])[0])

    def _restore(self, name: str, content: dict[str, Any], fit: dict[str, Any] | None) -> None:
        """Take what a file holds beside q; warn where the data are not those of the fit."""
        self.record, self.hist, self.gap_hist = content["record"], content["hist"], content["gap_hist"]
        self._data = data = self.density.data
        self._session = None if fit is None else SavedFit(self.density, self._state, fit["snapshot"], fit["log_p"])
        if not data.changed() and content["diagnosis"] is not None:
            with damaged(name):
                self._keep(diagnosis_of(content["diagnosis"], self.layout), content["share"])
