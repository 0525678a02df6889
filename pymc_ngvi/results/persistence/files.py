"""Trees of xarray in netCDF files and zarr stores: written as a whole or not at all, and read with nothing executed."""

import contextlib
import importlib.util
import json
import os
import shutil
import uuid

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import NDArray

#: Suffixes of netCDF files, and the one of zarr stores.
_NETCDF, _ZARR = (".nc", ".nc4", ".netcdf", ".h5"), ".zarr"
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: Codecs of zarr that only move bytes about. Others could run code of a file's choice.
_CODECS = frozenset(["bytes", "zstd", "gzip", "blosc", "crc32c", "transpose", "vlen-utf8", "sharding_indexed"])


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return where a tree is to be written, symbolic links followed."""
    given = Path(os.path.realpath(path))
    suffix = given.suffix.lower()
    if suffix not in (*_NETCDF, _ZARR):
        raise ValueError(
            f"The suffix says in which format to save: {', '.join(_NETCDF)} for netCDF, {_ZARR} for zarr; got "
            f"{os.fspath(path)!r}."
        )
    if is_zarr(given):
        _need_zarr()
    if not given.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(given.parent)!r}: make it first.")
    is_store = given.is_dir() and (given / "zarr.json").exists()
    if given.exists() and not (is_store if suffix == _ZARR else given.is_file()):
        what = "zarr store" if suffix == _ZARR else "file"
        raise FileExistsError(f"{str(given)!r} is there already, and is no {what} that could be replaced.")
    return given


def is_zarr(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is that of a zarr store, by its suffix."""
    return Path(path).suffix.lower() == _ZARR


def write(tree: xr.DataTree, path: Path, *, as_zarr: bool = False) -> None:
    """Write a tree to a path; what was there is replaced at the end, or kept where writing fails."""
    beside = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:12]}{path.suffix}")
    try:
        if as_zarr or is_zarr(path):
            # A consolidated copy of the metadata is no part of the format.
            tree.to_zarr(beside, mode="w-", consolidated=False, zarr_format=3)
            _replace_folder(beside, path)
        else:
            tree.to_netcdf(beside, engine="h5netcdf")
            os.replace(beside, path)
    finally:
        _remove(beside)


def _replace_folder(new: Path, path: Path) -> None:
    """Put a folder in the place of another, which comes back where that fails."""
    aside = new.with_name(new.name + "-old")
    if not path.exists():
        os.replace(new, path)
        return
    os.replace(path, aside)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(aside, path)
        raise
    shutil.rmtree(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[xr.DataTree]:
    """Open a file or store for reading."""
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r}.")
    options: dict[str, Any] = {"engine": "h5netcdf"}
    if given.is_dir():
        _check_store(given)
        options = {"engine": "zarr", "consolidated": False, "zarr_format": 3}
    elif not _is_hdf5(given):
        raise ValueError(f"{os.fspath(path)!r} is no netCDF-4 file: it was not written by approx.save.")
    try:
        tree = xr.open_datatree(given, decode_cf=False, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged, or was not written to its end: {error}") from error
    try:
        yield tree
    finally:
        tree.close()


def _is_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE


def _check_store(path: Path) -> None:
    """Raise ValueError for a folder that is no zarr store, or one with codecs that may do more than to move bytes."""
    found = sorted(path.rglob("zarr.json"))
    if not (path / "zarr.json").exists() or next(path.rglob(".z*"), None) is not None:
        raise ValueError(f"{str(path)!r} is no zarr store of version 3: it was not written by approx.save.")
    _need_zarr()
    for file in found:
        try:
            names = set(_codecs(json.loads(file.read_text(encoding="utf-8")).get("codecs", [])))
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{str(file)!r} is damaged: {error}") from error
        if names - _CODECS:
            raise ValueError(f"{str(file)!r} asks for {sorted(names - _CODECS)}, which approx.save does not use.")


def _codecs(listed: Any) -> Iterator[str]:
    for codec in listed:
        yield codec["name"]
        inner = codec.get("configuration", {})
        for key in ("codecs", "index_codecs"):
            yield from _codecs(inner.get(key, []))


def _need_zarr() -> None:
    if importlib.util.find_spec("zarr") is None:
        raise ImportError("A path that ends in .zarr needs the package zarr: `pip install zarr`, or write netCDF.")


def dataset_of(arrays: dict[str, NDArray[np.generic]]) -> xr.Dataset:
    """Return arrays as a dataset; axes of one length share a dimension."""
    data = {}
    for name, array in arrays.items():
        before = [array.shape[:axis].count(length) for axis, length in enumerate(array.shape)]
        dims = [f"n_{n}_{k + 1}" if k else f"n_{n}" for n, k in zip(array.shape, before, strict=True)]
        data[name] = xr.Variable(dims, array, encoding={"_FillValue": None})
    return xr.Dataset(data)


def arrays_of(tree: xr.DataTree) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of one group, read."""
    return {str(name): np.asarray(variable.values) for name, variable in tree.to_dataset().variables.items()}
