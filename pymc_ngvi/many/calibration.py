"""Whether the ranks of true values are uniform: by quantity, and in a sentence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.core.types import Array
from pymc_ngvi.many.fitting import Row
from pymc_ngvi.many.result import ManyFits

#: Chance of calling fits not calibrated that are.
_LEVEL = 0.01
#: Central intervals whose coverage is looked at.
_INTERVALS = (0.5, 0.9)
#: Standard deviation of a uniform distribution on (0, 1).
_UNIFORM_SD = 12.0**-0.5


class Calibration:
    """What simulation-based calibration has found; `calibrate` returns it.

    Attributes
    ----------
    pit : xarray.Dataset
        Over the dimension ``fit``: of each quantity, the part of its draws that is below the true value, between 0 and
        1; NaN where a fit failed. ``log_density`` is that of parameters and data.
    fits : ManyFits
        The fits, their verdicts and errors; ``fits.approx(i)`` makes one of them again.
    """

    def __init__(self, pit: xr.Dataset, fits: ManyFits) -> None:
        self.pit, self.fits = pit, fits

    @classmethod
    def of(cls, rows: Sequence[Row], fits: ManyFits, draws: int) -> "Calibration":
        """Make it of the rows of fits, by ranks among ``draws`` draws."""
        rows = sorted(rows, key=lambda row: row.index)
        done = [row for row in rows if row.ranks]
        made = {}
        for name, first in done[0].ranks.items():
            pit = np.full((len(rows), *first.shape), np.nan)
            pit[[k for k, row in enumerate(rows) if row.ranks]] = [
                (row.ranks[name] + 0.5) / (draws + 1) for row in done
            ]
            dims = ("fit", *done[0].dims.get(name, ()))
            labels = {d: done[0].labels[d] for d in dims if d in done[0].labels}
            made[name] = xr.DataArray(pit, dims=dims, coords={"fit": [row.index for row in rows], **labels})
        return cls(xr.Dataset(made), fits)

    @property
    def datatree(self) -> xr.DataTree:
        """The same for ArviZ: ``az.plot_ecdf_pit(calibration.datatree)``; fits that failed are left out."""
        done = self.pit.dropna("fit", how="all")
        return xr.DataTree.from_dict({"/prior_sbc": done.rename(fit="draw").expand_dims(chain=1)})

    def summary(self, *, only_reliable: bool = False) -> pd.DataFrame:
        """Return a row for each quantity.

        Parameters
        ----------
        only_reliable : bool, default False
            Whether to leave out those fits that are not said to be reliable. If fits are calibrated, those that are
            chosen by their data alone are, too.

        Returns
        -------
        pandas.DataFrame
            ``n``: fits. ``mean``: of the parts of draws that are below the true value, less a half, in its standard
            errors if they are uniform: above 0, fits lie too low. ``sd``: their standard deviation over that of a
            uniform distribution: above 1, fits are too narrow. ``coverage_50``, ``coverage_90``: part of the central
            intervals that hold the true value; their standard errors are ``sqrt(p (1 - p) / n)``. ``p_value``: of a
            test of uniformity, the POT-C of ArviZ.
        """
        chosen = self._chosen(only_reliable)
        labels, values = [], []
        for name, array in chosen.items():
            flat = array.values.reshape(array.shape[0], -1)
            labels += _labels(str(name), array)
            values.append(flat)
        columns = _measured(np.concatenate(values, axis=1))
        return pd.DataFrame(columns, index=pd.Index(labels, name="quantity"))

    def _chosen(self, only_reliable: bool) -> xr.Dataset:
        done = self.pit.dropna("fit", how="all")
        if only_reliable:
            reliable = self.fits.dataset.fit[self.fits.about("verdict") == "reliable"]
            done = done.sel(fit=done.fit.isin(reliable))
        if done.sizes["fit"] < 2:
            raise ValueError(f"{done.sizes['fit']} fits are left: too few to tell anything of them.")
        return done

    @property
    def is_calibrated(self) -> bool:
        """Whether no quantity stands against it: no P value below .01 over the number of quantities."""
        return not self._against()[0]

    @property
    def sentence(self) -> str:
        """The verdict in a few sentences, with its error."""
        against, table = self._against()
        n, total, k = int(table.n.max()), len(self.fits), len(table)
        few = f"{n:,} of {total:,} fits" if n < total else f"{n:,} fits"
        smallest = str(table.p_value.idxmin())
        coverage = ", ".join(
            f"{100 * p:.0f} % intervals hold {100 * table[f'coverage_{100 * p:.0f}'].mean():.1f} % of the true values"
            for p in _INTERVALS
        )
        error = 100 * np.sqrt(0.9 * 0.1 / n)
        of_all = f"{coverage} (of one quantity: {error:.1f} % by chance, at 90 %).{self._of_unreliable()}"
        if not against:
            return (
                f"Calibrated, as far as {few} tell: ranks of {k:,} quantities are uniform (smallest P value "
                f"{table.p_value.min():.2g}, of {smallest}). {of_all}"
            )
        shown = "; ".join(against[:5]) + ("; ..." if len(against) > 5 else "")
        which = f"ranks of {len(against):,} of {k:,} quantities are not uniform: {shown}"
        return f"Not calibrated, by {few}: {which}. {of_all}"

    def _of_unreliable(self) -> str:
        n = int((self.fits.about("verdict") == "not reliable").sum())
        return f" Fits that are not reliable: {n:,}; summary(only_reliable=True) leaves them out." if n else ""

    def _against(self) -> tuple[list[str], pd.DataFrame]:
        table = self.summary()
        low = table[table.p_value < _LEVEL / len(table)].sort_values("p_value")
        return [f"{name} {_how(row)} (P = {row.p_value:.1g})" for name, row in low.iterrows()], table

    def plot(self, var_names: Sequence[str] | None = None, **options: Any) -> Any:
        """Draw the difference of the ranks' distribution function from that of uniform ones, by `plot_ecdf_pit`.

        Parameters
        ----------
        var_names : sequence of str, optional
            Default: all.
        **options
            Of ``arviz_plots.plot_ecdf_pit``.

        Returns
        -------
        arviz_plots.PlotCollection
        """
        from arviz_plots import plot_ecdf_pit

        return plot_ecdf_pit(self.datatree, var_names=var_names, **options)

    def __repr__(self) -> str:
        """Return the verdict."""
        return f"Calibration({self.sentence})"


def _labels(name: str, array: xr.DataArray) -> list[str]:
    """Return the names of the elements of a quantity, as summaries of ArviZ have them."""
    dims = array.dims[1:]
    coords = [array[d].values if d in array.coords else np.arange(array.sizes[d]) for d in dims]
    return [
        f"{name}[{', '.join(str(c[i]) for c, i in zip(coords, at, strict=True))}]" if dims else name
        for at in np.ndindex(*array.shape[1:])
    ]


def _measured(pit: Array) -> dict[str, Array]:
    """Return the figures of quantities, (k,) each, by PIT values, (n, k)."""
    from arviz_stats.base import array_stats

    n, k = pit.shape
    shift = (pit.mean(axis=0) - 0.5) / (_UNIFORM_SD / np.sqrt(n))
    result = {"n": np.full(k, n), "mean": shift, "sd": pit.std(axis=0) / _UNIFORM_SD}
    for p in _INTERVALS:
        result[f"coverage_{100 * p:.0f}"] = (np.abs(pit - 0.5) < p / 2.0).mean(axis=0)
    result["p_value"] = np.array([float(array_stats.uniformity_test(pit[:, j])[0]) for j in range(k)])
    return result


def _how(row: pd.Series) -> str:
    """Say in what way ranks are not uniform."""
    spread_error = np.sqrt(0.2 / row.n)  # of the standard deviation of n uniform numbers, over its expectation
    ways = []
    if abs(row["mean"]) > 3.0:
        ways.append(f"lies too {'low' if row['mean'] > 0.0 else 'high'}")
    if abs(row.sd - 1.0) > 3.0 * spread_error:
        ways.append(f"is too {'narrow' if row.sd > 1.0 else 'wide'}")
    return " and ".join(ways) or "has another shape"
