"""An approximation from a file, on the user's model."""

import os
import warnings

from dataclasses import replace
from typing import Any

import pymc as pm
import xarray as xr

from pymc import modelcontext

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.shards.density import ShardedDensity, Shards
from pymc_ngvi.results.approximation import NGVIApproximation
from pymc_ngvi.results.fitted import restore
from pymc_ngvi.results.persistence import (
    Content,
    Saved,
    SavedData,
    damaged,
    differences,
    free_variables,
    q_of,
    reading,
    restored_generator,
)


def load(
    source: str | os.PathLike[str] | xr.DataTree, model: pm.Model | Shards | None = None, **options: Any
) -> NGVIApproximation:
    """Read an approximation that `NGVIApproximation.save` has written, and put it on a model.

    Nothing in a file is executed: it holds numbers, and tags of a few classes of this package.

    Parameters
    ----------
    source : str, PathLike or DataTree
        A netCDF file or zarr store, or what `NGVIApproximation.to_datatree` returned.
    model : pymc.Model or Shards, optional
        The model that was fitted, made again, or the shards; default: the model of the context.
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
    TypeError
        Without a model.
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
    if model is None and pm.Model.get_context(error_if_none=False) is None:
        raise TypeError(
            "load puts an approximation on the model that was fitted, which a file does not hold: build it again, and "
            "call load(file, model), or load(file) within `with model:`."
        )
    given = model if isinstance(model, Shards) else modelcontext(model)
    name = "The tree" if isinstance(source, xr.DataTree) else repr(os.fspath(source))
    if isinstance(source, xr.DataTree):
        saved = Saved.of(source, name)
    else:
        with reading(source) as tree:
            saved = Saved.of(tree, name)
    content = saved.content
    if "compile_kwargs" not in options or "mode" not in (options["compile_kwargs"] or {}):
        options.setdefault("backend", "auto" if content["backend"] == "given mode" else content["backend"])
    kind = ShardedDensity if isinstance(given, Shards) else LogDensity
    density: ModelDensity = kind(given, **options)
    model = density.model
    found = differences(content["variables"], free_variables(model, density.layout))
    if found:
        raise ValueError(f"{name} does not fit the model: " + "; ".join(found) + ".")
    data = SavedData(model, content["data"])
    density.info = replace(density.info, data=data)
    if changed := data.changed():
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
        approx._gaussian = gaussian
    approx._next_step = content.get("exact_step")
    return approx


def _approximation(name: str, content: Content, density: ModelDensity, fit: Content | None) -> NGVIApproximation:
    """Return one approximation of a file, on the density of a model."""
    with damaged(name):
        q = q_of(content["q"], density)
        generator = restored_generator(content["generator"])
    approx = NGVIApproximation(density, q, random_seed=generator, include_transformed=content["include_transformed"])
    restore(approx, name, content, fit)
    return approx
