"""`calibrate`: simulation-based calibration of a model and its fits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pymc as pm

from pymc_ngvi.core.seeds import Seed, seed_of
from pymc_ngvi.density.simulated import simulate
from pymc_ngvi.many.calibration import Calibration
from pymc_ngvi.many.entries import Case, Slots
from pymc_ngvi.many.fit_many import asked_of, checked_model, checked_names, sign_with_options
from pymc_ngvi.many.fitting import Fitter, Search
from pymc_ngvi.many.ranks import LOG_DENSITY
from pymc_ngvi.many.result import ManyFits
from pymc_ngvi.many.running import fitted_rows, workers_of

if TYPE_CHECKING:
    from distributed import Client

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
    model, names = checked_model(model, "calibrate(model)"), checked_names(model, var_names)
    place = workers_of(n_jobs, client)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < _FEWEST:
        raise ValueError(f"n should be the number of data sets, at least {_FEWEST}; got {n!r}.")
    if LOG_DENSITY in model.named_vars:
        raise ValueError(f"The model has a variable {LOG_DENSITY!r}, a name that ranks need: give it another one.")
    entropy = seed_of(random_seed)
    simulated = simulate(model, int(n), seed_of(np.random.SeedSequence(entropy, spawn_key=(0,))))
    slots = Slots.of(model, simulated[0].observed)
    asked = asked_of(
        slots, options, seed_of(np.random.SeedSequence(entropy, spawn_key=(1,))), draws, names, search=search
    )
    fitter, cases = Fitter(asked), (Case(one.observed, one) for one in simulated)
    rows = fitted_rows(fitter, cases, place, int(n), progressbar)
    fits = ManyFits(rows, fitter, [one.observed for one in simulated], {"draws": draws})
    return Calibration.of(rows, fits, draws)


sign_with_options(calibrate, "judge", "score")
