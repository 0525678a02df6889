"""What comes of many fits: a table by fit, and any one of them again."""

import itertools

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.many.entries import Entry, digest_of
from pymc_ngvi.many.fitting import STATISTICS, Fitter, Row
from pymc_ngvi.results.approximation import NGVIApproximation

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
        dimension ``statistic``: "mean", "sd", "lower", "upper". Of each fit there are ``verdict`` ("reliable", "not
        reliable", "not judged"), the ``sentence`` that says why, ``posterior`` ("exact", "nested", "moved",
        "gaussian"), ``status``, ``elbo`` and ``log_marginal_likelihood`` with standard errors (``_se``; NaN where there
        is none), ``searched`` (whether other modes were looked for), ``other_modes`` (whether some were found),
        ``seconds``, ``seed``, and ``error``: why it failed, empty where it did not. A variable of the model with one of
        these names puts ``fit_`` before it.
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
        arrays = self._fitter.asked.slots.checked(self._entry(i) if data is None else data)
        if digest_of(arrays) != self._digests[i]:
            raise ValueError(f"The data of fit {i} are not what they were: give those that it was made of, as data=.")
        return self._fitter.approx(i, arrays)

    def _entry(self, i: int) -> Entry:
        if iter(self._data) is self._data:
            raise ValueError(f"The data were read from an iterator, which is at its end: give fit {i} its data=.")
        return next(itertools.islice(self._data, i, None))


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
    if len(shapes) == 1 and all(_are_same(one, labels[0]) for one in labels):
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


def _are_same(one: Mapping[str, AnyArray], other: Mapping[str, AnyArray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[d], other[d]) for d in one)
