"""`fit_many`: one model, many data sets."""

import inspect
import itertools

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymc as pm

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.seeds import Seed, seed_of
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.fitting.signatures import joined_parameters, sign, split_options
from pymc_ngvi.inference import NGVI
from pymc_ngvi.many.drawn import made_folder
from pymc_ngvi.many.entries import Case, Entry, Slots, opened
from pymc_ngvi.many.fitting import Asked, Fitter, Search
from pymc_ngvi.many.result import ManyFits
from pymc_ngvi.many.running import fitted_rows, workers_of

if TYPE_CHECKING:
    from distributed import Client

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
    draws: int = 1_000,
    prob: float = 0.94,
    var_names: Sequence[str] | None = None,
    judge: bool = False,
    search: Search = "first",
    draws_to: str | Path | None = None,
    progressbar: bool = True,
    **options: Any,
) -> ManyFits:
    """Fit a model to many data sets, one after the other, in processes or on a Dask cluster.

    The model is read and compiled once. The first three fits are those that ``pm.fit(method="ngvi")`` makes. The others
    start from the first of these that converged. If the three have found no other modes, one in twenty of the others
    looks for some. Data sets of other sizes than that one start as a fit alone does.

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
        Folder for draws, as `NGVIApproximation.sample` gives them: ``fit_000000.nc`` and so on. If its name ends in
        ``.zarr``, it is a zarr store, with a group ``fit_000000`` and so on. Nothing else of a fit is kept but its
        summary.
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
        Slots.of(model, first), options, random_seed, draws, checked_names(model, var_names),
        prob=prob, judge=judge, search=search, folder=None if draws_to is None else made_folder(draws_to),
    )  # fmt: skip
    fitter, cases = Fitter(asked), map(Case, itertools.chain([first], entries))
    rows = fitted_rows(fitter, cases, place, total, progressbar)
    return ManyFits(rows, fitter, data, {"prob": prob, "draws": draws})


def asked_of(
    slots: Slots, options: Mapping[str, Any], random_seed: Seed, draws: int, names: frozenset[str] | None, *,
    prob: float = 0.94, judge: bool = False, search: Search = "first", folder: Path | None = None,
) -> Asked:  # fmt: skip
    """Return what is the same for all fits, checked."""
    of_constructor, of_fit = _options(options)
    return Asked(
        slots, of_constructor, of_fit, seed_of(random_seed), check_draws(draws), _checked_prob(prob), names, judge,
        _checked_search(search), folder,
    )  # fmt: skip


def _options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `NGVI`, and those of its `fit`."""
    for name, why in _NOT_FOR_MANY.items():
        if options.get(name) is not None:
            raise TypeError(f"Many fits do not take {name}: {why}.")
    return split_options({k: v for k, v in options.items() if k not in _NOT_FOR_MANY}, NGVI.__init__, NGVI.fit)


def checked_model(model: object, call: str) -> pm.Model:
    """Return what was given as a model; raise TypeError where it is none."""
    if not isinstance(model, pm.Model):
        raise TypeError(f"{call.partition('(')[0]} takes a model first: {call}. Got {shortened(model)}.")
    return model


def _checked_prob(prob: object) -> float:
    if isinstance(prob, bool) or not isinstance(prob, int | float) or not 0.0 < prob < 1.0:
        raise ValueError(f"prob should be between 0 and 1; got {prob!r}.")
    return float(prob)


def _checked_search(search: Search) -> Search:
    if search not in ("first", "each"):
        raise ValueError(f"search should be 'first' or 'each'; got {search!r}.")
    return search


def checked_names(model: pm.Model, names: Sequence[str] | None) -> frozenset[str] | None:
    """Return the names of the variables that are kept, None for all; raise ValueError for what is no variable."""
    if names is None:
        return None
    valid = [v.name for v in [*model.free_RVs, *model.deterministics]]
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ValueError("var_names is empty: name at least one variable, or leave it out for all of them.")
    for name in names:
        if name not in valid:
            raise ValueError(f"var_names has {name!r}, which the model has not: {suggestion(name, valid)}")
    return frozenset(names)


def sign_with_options(function: Callable[..., Any], *without: str) -> None:
    """Give a function that fits many times the options of `NGVI` and of its `fit` in its signature."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    left_out = (*_NOT_FOR_MANY, *without, "unknown")
    sign(function, [p for p in joined_parameters(own, NGVI.__init__, NGVI.fit) if p.name not in left_out])


sign_with_options(fit_many)
