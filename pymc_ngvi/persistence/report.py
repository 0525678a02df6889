"""An approximation as a tree of xarray, in a file, and back on the user's model."""

import os
import warnings

from typing import TYPE_CHECKING, Any

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray
from pymc import modelcontext

from pymc_ngvi.convert import flat_dataset
from pymc_ngvi.defaults import OURS
from pymc_ngvi.diagnostics import FitReport
from pymc_ngvi.model import LogDensity
from pymc_ngvi.persistence import files
from pymc_ngvi.persistence.content import (
    APPROXIMATION,
    FIT,
    UNCONSTRAINED,
    Saved,
    content_of_generator,
    content_of_q,
    damaged,
    generator_of,
    group_of,
    q_of,
    readable,
    versions,
)
from pymc_ngvi.persistence.matching import SavedData, differences, fingerprints, free_variables
from pymc_ngvi.persistence.pickling import Pickled
from pymc_ngvi.persistence.verdicts import content_of_diagnosis, diagnosis_of
from pymc_ngvi.result import FitRecord

if TYPE_CHECKING:
    from pymc_ngvi.approximation import NGVIApproximation

#: Relative change of log p at the mean of q that is no rounding error.
_LOGP_RTOL = 1e-6


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

    def _resumable(self) -> "_Resumable | None":
        """Return what the fit needs to go on, without what can be made again."""
        if self._session is None or (isinstance(self._session, _Resumable) and self._session.is_idle):
            return self._session
        return _Resumable(self, self._session.snapshot(), self._log_p_at_mean())

    def _log_p_at_mean(self) -> float | None:
        """Return log p at the mean of q, which tells models apart that differ in a prior; None for minibatches."""
        if isinstance(self._session, _Resumable) and self._session.is_idle:
            return self._session.log_p
        if self.density.has_minibatch or self._data.changed():
            return None
        return float(self.log_p(self._distribution.mean()[None])[0])

    def _restore(self, name: str, content: dict[str, Any], fit: dict[str, Any] | None) -> None:
        """Take what a file holds beside q; warn where the data are not those of the fit."""
        self.record, self.hist, self.gap_hist = content["record"], content["hist"], content["gap_hist"]
        self._data = data = self.density.data
        self._session = None if fit is None else _Resumable(self, fit["snapshot"], fit["log_p"])
        # Files of earlier versions have no diagnosis.
        if not data.changed() and content.get("diagnosis") is not None:
            with damaged(name):
                self._keep(diagnosis_of(content["diagnosis"], self.layout), content["share"])


class _Resumable:
    """A fit that was saved: made again when it is to go on."""

    def __init__(self, approx: Any, snapshot: Any, log_p: float | None) -> None:
        self._approx, self._snapshot, self.log_p = approx, snapshot, log_p
        self._session: Any = None

    @property
    def is_idle(self) -> bool:
        """Whether the fit has not gone on yet."""
        return self._session is None

    def snapshot(self) -> Any:
        """Return what the fit needs to go on in another process."""
        return self._snapshot if self.is_idle else self._session.snapshot()

    def refine(self, *args: Any, **kwargs: Any) -> Any:
        """Go on; see `NGVIApproximation.refine`."""
        from pymc_ngvi.session import FitSession

        self._approx.refuse_changed_data("The fit can't go on with other data")
        if self.is_idle:
            self._check_log_p()
            self._session = FitSession.resumed(self._approx, self._snapshot)
        return self._session.refine(*args, **kwargs)

    def tell(self, approx: Any) -> None:
        """Say how the fit went on."""
        self._session.tell(approx)

    def _check_log_p(self) -> None:
        if self.log_p is None:
            return
        now = float(self._approx.log_p(self._approx.mean_flat[None])[0])
        if not np.isclose(now, self.log_p, rtol=_LOGP_RTOL, atol=_LOGP_RTOL, equal_nan=True):
            raise ValueError(
                f"The fit can't go on: at the mean of q, log p of this model is {now:.8g}, and that of the model which "
                f"was fitted {self.log_p:.8g}. The priors, or data that are no pm.Data, differ: fit again."
            )


def load(
    source: str | os.PathLike[str] | xr.DataTree, model: pm.Model | None = None, **options: Any
) -> "NGVIApproximation":
    """Read an approximation that `NGVIApproximation.save` has written, and put it on a model.

    Nothing in a file is executed: it holds numbers, and tags of a few classes of this package.

    Parameters
    ----------
    source : str, PathLike or DataTree
        A netCDF file or zarr store, or what `NGVIApproximation.to_datatree` returned.
    model : pymc.Model, optional
        The model that was fitted, made again; default: that of the context.
    **options
        ``backend`` and ``compile_kwargs`` of `LogDensity`; by default the backend that the fit had. With another one,
        a fit goes on with other roundings.

    Returns
    -------
    NGVIApproximation
        Draws for a seed, densities, record and history have the same bits as those of the one that was saved, on the
        same platform, and so has `refine`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is damaged, was not written by this package, or by a newer version of it; if the free variables of
        the model are not those of the file, with a list of what differs.

    Warns
    -----
    UserWarning
        If the observed data, or ``pm.Data``, are not those that were fitted: q is then no approximation of the
        posterior of this model, and `refine`, `khat` and the like are refused.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     approx.save(Path(folder) / "approx.nc")
    ...     again = pymc_ngvi.load(Path(folder) / "approx.nc", model)
    >>> bool(again.elbo == approx.elbo)
    True
    """
    if unknown := set(options) - {"backend", "compile_kwargs"}:
        raise TypeError(f"load does not know {', '.join(sorted(unknown))}; it takes backend and compile_kwargs.")
    model = modelcontext(model)
    name = "The tree" if isinstance(source, xr.DataTree) else repr(os.fspath(source))
    if isinstance(source, xr.DataTree):
        saved = Saved.of(source, name)
    else:
        with files.reading(source) as tree:
            saved = Saved.of(tree, name)
    content = saved.content
    if "compile_kwargs" not in options or "mode" not in (options["compile_kwargs"] or {}):
        options.setdefault("backend", "auto" if content["backend"] == "given mode" else content["backend"])
    density = LogDensity(model, **options)
    found = differences(content["variables"], free_variables(model, density.layout))
    if found:
        raise ValueError(f"{name} does not fit the model: " + "; ".join(found) + ".")
    fitted_with = saved.fit["snapshot"].options if saved.fit else content["record"]
    _prepare(density, fitted_with)
    density.data = SavedData(model, content["data"])
    if changed := density.data.changed():
        warnings.warn(
            f"{name} was fitted to other data: {', '.join(map(repr, changed))} differ, or are not in both. It "
            "approximates the posterior given those; it can't be refined or judged on this model.",
            UserWarning,
            skip_file_prefixes=OURS,
        )
    of_gaussian = content.get("gaussian")
    approx = _approximation(name, content, density, None if of_gaussian else saved.fit)
    if of_gaussian:
        gaussian = _approximation(name, of_gaussian, density, saved.fit)
        approx._gaussian, approx._exact_step = gaussian, content["exact_step"]
    return approx


def _approximation(
    name: str, content: dict[str, Any], density: LogDensity, fit: dict[str, Any] | None
) -> "NGVIApproximation":
    """Return one approximation of a file, on the density of a model."""
    from pymc_ngvi.approximation import NGVIApproximation

    with damaged(name):
        q = q_of(content["q"], density)
        generator = generator_of(content["generator"])
    approx = NGVIApproximation(density, q, random_seed=generator, include_transformed=content["include_transformed"])
    approx._restore(name, content, fit)
    return approx


def _prepare(density: LogDensity, fitted_with: Any) -> None:
    """Build what a fit builds before its first evaluation: how the gradient rounds depends on the order.

    Parameters
    ----------
    density : LogDensity
    fitted_with : FitOptions, FitRecord or None
    """
    if fitted_with is None:
        return
    choice = getattr(fitted_with, "choice", fitted_with)
    if fitted_with.family_reason or fitted_with.reparam or choice.family == "sparse":
        density.pattern  # noqa: B018 (found once)
    if choice.estimator == "price":
        density.hessian_error()
