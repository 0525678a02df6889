"""Whether the ranks of true values are uniform: by quantity, and in a sentence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pymc as pm
import xarray as xr

from pymc_ngvi.core.seeds import Seed, seed_of
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.info import simulate
from pymc_ngvi.many.fit_many import ManyFits, asked_of, checked_model, sign_with_options
from pymc_ngvi.many.fitting import LOG_DENSITY, Case, Fitter, Row, Search, Slots
from pymc_ngvi.many.running import fitted_rows, workers_of
from pymc_ngvi.results.convert import element_names

if TYPE_CHECKING:
    from distributed import Client

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
        for array in chosen.values():
            flat = array.values.reshape(array.shape[0], -1)
            labels += element_names(array, 1)
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


#: Data sets at least: with fewer, no test of uniformity tells anything.
_FEWEST = 20


def calibrate(
    model: pm.Model,
    n: int = 200,
    *,
    n_jobs: int = 1,
    client: "Client | None" = None,
    random_seed: Seed = None,
    draws: int = 999,
    var_names: Sequence[str] | None = None,
    search: Search = "first",
    progressbar: bool = True,
    **options: Any,
) -> Calibration:
    """Check by simulation whether the fits of a model are calibrated.

    Parameters are drawn from the prior, data from the model given these, and the model is fitted to the data. If the
    fits are the posteriors, the rank of each true value among draws of its fit is uniform [1]_. This is looked at for
    each variable and Deterministic, and for the log density of parameters and data, which sees what no variable shows
    alone [2]_.

    Parameters
    ----------
    model : pymc.Model
        With proper priors, and without ``pm.Potential``. It has its own data back at the end.
    n : int, default 200
        Data sets.
    n_jobs : int, default 1
        Processes; -1: as many as there are cores. The result is the same, to the bit. A script needs
        ``if __name__ == "__main__":`` around the call.
    client : distributed.Client, optional
        Of Dask: fits are made on its workers, in the place of processes. The result is the same, to the bit.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
    draws : int, default 999
        Of each fit, among which true values are ranked.
    var_names : sequence of str, optional
        Free variables and Deterministics to rank. Default: all.
    search : {"first", "each"}, default "first"
        In which fits other modes are looked for; see `fit_many`.
    progressbar : bool, default True
    **options
        Those of `NGVI` and `NGVI.fit`, for all fits.

    Returns
    -------
    Calibration

    Raises
    ------
    TypeError, ValueError
        Before any fit: for a model that can't be simulated from, names that it does not have, too few data sets; as
        `NGVI` for its options. At the end, if every fit has failed.

    References
    ----------
    .. [1] S. Talts, M. Betancourt, D. Simpson, A. Vehtari, A. Gelman (2018). Validating Bayesian inference algorithms
           with simulation-based calibration. https://doi.org/10.48550/arXiv.1804.06788
    .. [2] M. Modrák et al. (2023). Simulation-based calibration checking for Bayesian computation: the choice of test
           quantities shapes sensitivity. Bayesian Analysis. https://doi.org/10.1214/23-BA1404

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu", 0.0, 3.0)
    ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
    >>> calibration = pymc_ngvi.calibrate(model, 50, random_seed=1, progressbar=False)
    >>> calibration.is_calibrated
    True
    """
    model = checked_model(model, "calibrate(model)")
    place = workers_of(n_jobs, client)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < _FEWEST:
        raise ValueError(f"n should be the number of data sets, at least {_FEWEST}; got {n!r}.")
    if LOG_DENSITY in model.named_vars:
        raise ValueError(f"The model has a variable {LOG_DENSITY!r}, a name that ranks need: give it another one.")
    entropy = seed_of(random_seed)
    simulated = simulate(model, int(n), seed_of(np.random.SeedSequence(entropy, spawn_key=(0,))))
    slots = Slots.of(model, simulated[0].observed)
    asked = asked_of(
        slots, options, seed_of(np.random.SeedSequence(entropy, spawn_key=(1,))), draws, var_names, search=search
    )
    fitter, cases = Fitter(asked), (Case(one.observed, one) for one in simulated)
    rows = fitted_rows(fitter, cases, place, int(n), progressbar)
    fits = ManyFits(rows, fitter, [one.observed for one in simulated], {"draws": draws})
    return Calibration.of(rows, fits, draws)


sign_with_options(calibrate, "judge", "score")
