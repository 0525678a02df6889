"""What comes of many fits: a table by fit, and any one of them again."""

import inspect
import itertools

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pymc as pm
import xarray as xr

from pymc_ngvi.core.messages import checked_names, listed, percent, shortened
from pymc_ngvi.core.sizes import N_PREDICTED, Seed, check_draws, seed_of
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.core.verdict import Word
from pymc_ngvi.density.info import simulate
from pymc_ngvi.fitting.options import joined_parameters, sign, split_options
from pymc_ngvi.inference import NGVI
from pymc_ngvi.many.fitting import (
    LOG_DENSITY,
    STATISTICS,
    Asked,
    Case,
    Entry,
    Fitter,
    Row,
    Search,
    Slots,
    fitted_rows,
    made_folder,
    opened,
    workers_of,
)
from pymc_ngvi.results.approximation import NGVIApproximation
from pymc_ngvi.results.distributions import element_names
from pymc_ngvi.results.persistence import digest_of

if TYPE_CHECKING:
    from distributed import Client

#: What is said of each fit, and what stands where there is none.
_ABOUT: dict[str, Any] = {
    "verdict": "",
    "sentence": "",
    "posterior": "",
    "status": "",
    "elbo": np.nan,
    "elbo_se": np.nan,
    "log_marginal_likelihood": np.nan,
    "log_marginal_likelihood_se": np.nan,
    "searched": False,
    "other_modes": False,
    "seconds": np.nan,
}


class ManyFits:
    """Summaries of many fits of a model; `fit_many` returns it.

    Attributes
    ----------
    dataset : xarray.Dataset
        Over the dimension ``fit``. Each variable of the model, Deterministics included, is there by its name, with the
        dimension ``statistic``: "mean", "sd", "lower", "upper". Of each fit there are ``verdict`` ("exact", "exact, few
        draws", "reliable", "not judged", "not reliable"), the ``sentence`` that says why, ``posterior`` ("exact",
        "nested", "moved", "gaussian"), ``status``, ``elbo`` and ``log_marginal_likelihood`` with standard errors
        (``_se``; NaN where there is none), ``searched`` (whether other modes were looked for), ``other_modes`` (whether
        some were found), ``seconds``, ``seed``, and ``error``: why it failed, empty where it did not. A variable of the
        model with one of these names puts ``fit_`` before it.
    """

    def __init__(self, rows: Sequence[Row], fitter: Fitter, data: Iterable[Entry], attrs: Mapping[str, Any]) -> None:
        rows = sorted(rows, key=lambda row: row.index)
        self.dataset = _dataset(rows).assign_attrs(attrs)
        self._fitter, self._data = fitter, data
        self._digests = {row.index: row.digest for row in rows}

    def __len__(self) -> int:
        """Return the number of fits, also of those that failed."""
        return int(self.dataset.sizes["fit"])

    def __repr__(self) -> str:
        """Return how many fits there are, how many of them failed, and what is known of the others."""
        error, counts = self.about("error"), Counter(map(str, self.about("verdict")))
        counts.pop("", None)
        failed = int((error != "").sum())
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items()] + [f"{failed:,} failed"] * bool(failed)
        return f"ManyFits({len(self):,} fits: {', '.join(parts)})"

    def about(self, name: str) -> AnyArray:
        """Return what is said of each fit, (fit,): a column of ``dataset``, whatever it is called there.

        Parameters
        ----------
        name : str
            Such as "verdict".

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model() as model:
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        >>> many = pymc_ngvi.fit_many(model, [{"y": np.zeros(5)}, {"y": np.ones(5)}], random_seed=1, progressbar=False)
        >>> many.about("error").tolist()
        ['', '']
        """
        return np.asarray(self.dataset[f"fit_{name}" if f"fit_{name}" in self.dataset else name])

    def approx(self, i: int, data: Entry | None = None) -> NGVIApproximation:
        """Return the approximation of one fit: it is fitted again, with the same seed, which gives the same bits.

        The model has the data of this fit from then on, as after ``pm.set_data``.

        Parameters
        ----------
        i : int
            Its place among the data, from 0.
        data : dict, optional
            Its data; needed where those of `fit_many` were an iterator, which can be read once.

        Raises
        ------
        IndexError
            If there is no such fit.
        ValueError
            If its data are not there any more, or are not those of the fit; or as the fit did, if it failed.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model() as model:
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        >>> many = pymc_ngvi.fit_many(model, [{"y": np.zeros(5)}, {"y": np.ones(5)}], random_seed=1, progressbar=False)
        >>> round(float(many.approx(1).mean_data["mu"]), 2)
        0.98
        """
        if i not in self._digests:
            raise IndexError(f"There is no fit {i!r}: they are numbered from 0 to {max(self._digests)}.")
        if data is None:
            if iter(self._data) is self._data:
                raise ValueError(f"The data were read from an iterator, which is at its end: give fit {i} its data=.")
            data = next(itertools.islice(self._data, i, None))
        arrays = self._fitter.asked.slots.checked(data)
        if digest_of(arrays) != self._digests[i]:
            raise ValueError(f"The data of fit {i} are not what they were: give those that it was made of, as data=.")
        return self._fitter.approx(i, arrays)


def _dataset(rows: Sequence[Row]) -> xr.Dataset:
    """Return one table of all fits; where sizes differ, NaN stands for what is not there."""
    fit = [row.index for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    made = {name: _stacked(name, rows) for name in names}
    about: dict[str, list[Any]] = {name: [row.about.get(name, none) for row in rows] for name, none in _ABOUT.items()}
    about |= {"seed": [np.uint64(row.seed) for row in rows], "error": [row.error for row in rows]}
    of_fits = {f"fit_{name}" if name in names else name: ("fit", values) for name, values in about.items()}
    return xr.Dataset({**made, **of_fits}, coords={"fit": fit})


def _stacked(name: str, rows: Sequence[Row]) -> xr.DataArray:
    """Return the statistics of a variable, (fit, statistic, ...)."""
    there = [row for row in rows if name in row.values]
    first = there[0]
    dims = ("statistic", *first.dims[name])
    labels = [{d: row.labels[d] for d in row.dims[name] if d in row.labels} for row in there]
    shapes = {row.values[name].shape for row in there}
    if len(shapes) == 1 and all(
        one.keys() == labels[0].keys() and all(np.array_equal(one[d], labels[0][d]) for d in one) for one in labels
    ):
        values = np.full((len(rows), *first.values[name].shape), np.nan)
        for k, row in enumerate(rows):
            if name in row.values:
                values[k] = row.values[name]
        coords = {"fit": [row.index for row in rows], "statistic": list(STATISTICS), **labels[0]}
        return xr.DataArray(values, dims=("fit", *dims), coords=coords)
    arrays = []
    for row, own in zip(there, labels, strict=True):
        values = row.values[name]
        plain = {d: np.arange(n) for d, n in zip(dims[1:], values.shape[1:], strict=True) if d not in own}
        arrays.append(xr.DataArray(values, dims=dims, coords={"statistic": list(STATISTICS), **plain, **own}))
    joined = xr.concat(arrays, xr.Variable("fit", [row.index for row in there]), join="outer")
    return joined.reindex(fit=[row.index for row in rows])


#: Of intervals, unless asked otherwise.
_PROB = 0.94
#: Options of a single fit that make no sense for many, and why.
_NOT_FOR_MANY = {
    "shards": "they are those of a model",
    "batches": "the data of a fit are one dict, in memory",
    "callbacks": "each fit is summarised when it is done",
    "progressbar_theme": "the progress is that of all fits",
}


def fit_many(
    model: pm.Model,
    data: Iterable[Entry],
    *,
    n_jobs: int = 1,
    client: "Client | None" = None,
    random_seed: Seed = None,
    draws: int = N_PREDICTED,
    prob: float = _PROB,
    var_names: Sequence[str] | None = None,
    judge: bool = False,
    search: Search = "first",
    draws_to: str | Path | None = None,
    progressbar: bool = True,
    **options: Any,
) -> ManyFits:
    """Fit a model to many data sets, one after the other, in processes or on a Dask cluster.

    The model is read and compiled once. The first three fits are those that ``pm.fit(method="ngvi")`` makes. If these
    have found no other modes, the others begin from the first of them that converged: exact and nested posteriors from
    its posterior, without a Gaussian fit, with an effective size of 96 in one hyperparameter, up to 420 in four or
    more. One in twenty looks for other modes. Data sets of other sizes than that one start as a fit alone does.

    Parameters
    ----------
    model : pymc.Model
        It has its own data back at the end.
    data : iterable of dict
        Of each fit: arrays by the name of a ``pm.Data`` or of an observed variable. All dicts have the same names.
        Sizes may differ where the model allows it; for dims with labels, a dict then has these, too, by the name of the
        dim. Read once, as it is needed: a generator will do.
    n_jobs : int, default 1
        Processes; -1: as many as there are cores. The result is the same, to the bit. A script needs
        ``if __name__ == "__main__":`` around the call.
    client : distributed.Client, optional
        Of Dask: fits are made on its workers, in the place of processes. The result is the same, to the bit.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        Each fit has a seed of its own, which follows from this one and from its place.
    draws : int, default 1_000
        Behind means, standard deviations and limits.
    prob : float, default 0.94
        Of the intervals, which have equal tails.
    var_names : sequence of str, optional
        Free variables and Deterministics to keep. Default: all.
    judge : bool, default False
        Whether to judge each fit by ``approx.diagnose()``. Exact, nested and moved posteriors have a verdict without
        it; Gaussians are "not judged" then. It takes longer than a Gaussian fit.
    search : {"first", "each"}, default "first"
        Whether other modes are looked for in the first three fits, and, where these have none, in one in twenty of
        the others; or in each fit. The table says of each whether it was searched. If one of the twentieth has other
        modes, those that were not searched are "not judged", and there is a warning.
    draws_to : str or Path, optional
        Folder for draws, as `NGVIApproximation.sample` gives them: ``fit_000000.nc`` and so on. Nothing else of a
        fit is kept but its summary.
    progressbar : bool, default True
    **options
        Those of `NGVI` and `NGVI.fit`, for all fits.

    Returns
    -------
    ManyFits
        Its ``dataset`` has a row for each fit. A fit that fails has its reason there as ``error``. After an interrupt
        from the keyboard, it has the fits that were done.

    Raises
    ------
    TypeError, ValueError
        Before any fit: for data that are no iterable of dicts, or empty; for names that the model does not have; for
        something that is no client; as `NGVI` for its options. At the end, if every fit has failed.
    BrokenExecutorError
        For a client that is closed, before any fit. Where its cluster is lost later, the fits that were done are kept,
        and a warning says so.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu", 0.0, 3.0)
    ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
    >>> data = ({"y": np.full(5, mean)} for mean in (0.0, 1.0, 2.0, 3.0))
    >>> many = pymc_ngvi.fit_many(model, data, random_seed=1, progressbar=False)
    >>> many.dataset["mu"].sel(statistic="mean").round(1).values.tolist()
    [0.0, 1.0, 2.0, 2.9]
    """
    model, place = checked_model(model, "fit_many(model, data)"), workers_of(n_jobs, client)
    entries, total = opened(data)
    first = next(entries, None)
    if first is None:
        raise ValueError("data is empty: give a dict of arrays for each fit.")
    asked = asked_of(
        Slots.of(model, first), options, random_seed, draws, var_names,
        prob=prob, judge=judge, search=search, folder=None if draws_to is None else made_folder(draws_to),
    )  # fmt: skip
    fitter, cases = Fitter(asked), map(Case, itertools.chain([first], entries))
    rows = fitted_rows(fitter, cases, place, total, progressbar)
    return ManyFits(rows, fitter, data, {"prob": prob, "draws": draws})


def asked_of(
    slots: Slots, options: Mapping[str, Any], random_seed: Seed, draws: int, var_names: Sequence[str] | None, *,
    prob: float = _PROB, judge: bool = False, search: Search = "first", folder: Path | None = None,
) -> Asked:  # fmt: skip
    """Return what is the same for all fits, checked."""
    for name, why in _NOT_FOR_MANY.items():
        if options.get(name) is not None:
            raise TypeError(f"Many fits do not take {name}: {why}.")
    of_constructor, of_fit = split_options(
        {k: v for k, v in options.items() if k not in _NOT_FOR_MANY}, NGVI.__init__, NGVI.fit
    )
    if isinstance(prob, bool) or not isinstance(prob, int | float) or not 0.0 < prob < 1.0:
        raise ValueError(f"prob should be between 0 and 1; got {prob!r}.")
    if search not in ("first", "each"):
        raise ValueError(f"search should be 'first' or 'each'; got {search!r}.")
    valid = [v.name for v in (*slots.model.free_RVs, *slots.model.deterministics)]
    names = None if var_names is None else frozenset(checked_names(var_names, valid))
    return Asked(
        slots,
        of_constructor,
        of_fit,
        seed_of(random_seed),
        check_draws(draws),
        float(prob),
        names,
        judge,
        search,
        folder,
    )


def checked_model(model: object, call: str) -> pm.Model:
    """Return what was given as a model; raise TypeError where it is none."""
    if not isinstance(model, pm.Model):
        raise TypeError(f"{call.partition('(')[0]} takes a model first: {call}. Got {shortened(model)}.")
    return model


def sign_with_options(function: Callable[..., Any], *without: str) -> None:
    """Give a function that fits many times the options of `NGVI` and of its `fit` in its signature."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    left_out = (*_NOT_FOR_MANY, *without, "unknown")
    sign(function, [p for p in joined_parameters(own, NGVI.__init__, NGVI.fit) if p.name not in left_out])


sign_with_options(fit_many)


# --- whether the ranks of true values are uniform: by quantity, and in a sentence ---

#: Chance of calling fits not calibrated that are.
_LEVEL = 0.01
#: Central intervals whose coverage is looked at, by their per cent.
_INTERVALS = {"50": 0.5, "90": 0.9}
#: Standard errors by which ranks are said to lie to one side, or to be too wide.
_N_SE = 3.0
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
            labels = {d: done[0].labels.get(d, np.arange(n)) for d, n in zip(dims[1:], pit.shape[1:], strict=True)}
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
        done = self.pit.dropna("fit", how="all")
        if only_reliable:
            doubtful = [Word.NOT_JUDGED.value, Word.NOT_RELIABLE.value]
            reliable = self.fits.dataset.fit[~np.isin(self.fits.about("verdict"), doubtful)]
            done = done.sel(fit=done.fit.isin(reliable))
        if (n := done.sizes["fit"]) < 2:
            raise ValueError(f"{n} fits are left: too few to tell anything of them.")
        labels = [label for array in done.values() for label in element_names(array, 1)]
        columns = _measured(np.concatenate([array.values.reshape(n, -1) for array in done.values()], axis=1))
        return pd.DataFrame(columns, index=pd.Index(labels, name="quantity"))

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
            f"{name} % intervals hold {percent(table[f'coverage_{name}'].mean(), '.1f')} of the true values"
            for name in _INTERVALS
        )
        *_, (widest, p) = _INTERVALS.items()
        error = percent(np.sqrt(p * (1.0 - p) / n), ".1f")
        of_all = f"{coverage} (of one quantity: {error} by chance, at {widest} %).{self._of_unreliable()}"
        if not against:
            return (
                f"Calibrated, as far as {few} tell: ranks of {k:,} quantities are uniform (smallest P value "
                f"{table.p_value.min():.2g}, of {smallest}). {of_all}"
            )
        which = f"ranks of {len(against):,} of {k:,} quantities are not uniform: {listed(against, '{}')}"
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
    inside = {f"coverage_{name}": (np.abs(pit - 0.5) < p / 2.0).mean(axis=0) for name, p in _INTERVALS.items()}
    p_value = np.array([float(array_stats.uniformity_test(pit[:, j])[0]) for j in range(k)])
    return {"n": np.full(k, n), "mean": shift, "sd": pit.std(axis=0) / _UNIFORM_SD, **inside, "p_value": p_value}


def _how(row: pd.Series) -> str:
    """Say in what way ranks are not uniform."""
    spread_error = np.sqrt(0.2 / row.n)  # of the standard deviation of n uniform numbers, over its expectation
    ways = []
    if abs(row["mean"]) > _N_SE:
        ways.append(f"lies too {'low' if row['mean'] > 0.0 else 'high'}")
    if abs(row.sd - 1.0) > _N_SE * spread_error:
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
