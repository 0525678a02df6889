"""Draws of each fit, in netCDF files or in groups of a zarr store."""

from pathlib import Path

import xarray as xr

from pymc_ngvi.results.persistence.files import check_path, is_zarr, write


def made_folder(path: str | Path) -> Path:
    """Return where draws go: a folder, or a zarr store by a suffix that says so; made where it is not there."""
    if is_zarr(path):
        folder = check_path(path)
        import zarr

        zarr.open_group(folder, mode="a", zarr_format=3)  # groups that are there stay
        return folder
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"draws_to should be a folder; {str(folder)!r} is a file.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_draws(tree: xr.DataTree, folder: Path, index: int) -> None:
    """Write the draws of a fit: as a whole or not at all. Processes don't meet: each fit has a file, or a group."""
    name = f"fit_{index:06d}"
    if is_zarr(folder):
        write(tree, folder / name, as_zarr=True)
    else:
        write(tree, folder / f"{name}.nc")
