"""Sites: what each observation contributes to q, what q is without it, and how well that predicts it."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import xarray as xr

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.observed_rows import ObservedKind, ObservedRows, observed_rows
from pymc_ngvi.results.convert import axes_of, elpd_attrs
from pymc_ngvi.results.distributions import Posterior
from pymc_ngvi.rows.linear_map import Entries, ManyMaps
from pymc_ngvi.rows.sites import RowSites, row_sites, site_moments

#: Nats by which a predictive density may be wrong by quadrature.
_MOST_ERROR = 1e-3
#: Part of the precision of q, due to one observation, above which what is predicted without it is not reliable.
INFLUENTIAL = 0.3
#: What is NaN where there is no one linear predictor.
_OF_PREDICTOR = (
    "mean", "variance", "alpha", "gamma", "natural", "pseudo_observation", "cavity_mean", "cavity_variance"
)  # fmt: skip


def sites(posterior: Posterior, var_name: str | None) -> xr.Dataset:
    """Return the sites of an observed variable; see `NGVIApproximation.sites`."""
    density = posterior.density
    if not isinstance(density, LogDensity):
        parts, one = ("shards", "shard") if density.is_sharded else ("batches", "batch")
        raise ValueError(
            f"The rows are in {parts}, and have no sites here. Fit a {one} alone to see those of its rows."
        )
    q, name = _gaussian(posterior), observed_name(posterior, var_name)
    posterior.check_weights()
    try:
        found = observed_rows(density, name)
        kinds = list(zip(found.kinds, _sites_of(found, q), strict=True))
    except NotApart as error:
        raise ValueError(
            f"The observations of {name!r} have no sites, as their log densities are not functions of a few linear "
            f"predictors each: {error}. For predictive densities take pm.compute_log_likelihood on draws, and "
            "arviz.loo."
        ) from error
    values = {key: np.full(int(np.prod(found.shape)), np.nan) for key in (*_OF_PREDICTOR, "influence", "log_density")}
    for kind, of_rows in kinds:
        unclear = ~(of_rows.error <= _MOST_ERROR)
        values["influence"][kind.elements] = of_rows.influence
        values["log_density"][kind.elements] = np.where(unclear, np.nan, of_rows.log_predictive)
        if kind.linear is not None:
            for key, value in _of_linear_predictor(kind, of_rows).items():
                values[key][kind.elements] = value
    return _dataset(posterior, name, found.shape, values)


def _gaussian(posterior: Posterior) -> GaussianState:
    """Return q; raise ValueError where it is no Gaussian."""
    q = getattr(posterior.distribution, "q", None)
    if q is None or not hasattr(q, "covariances"):
        exact = posterior.record is not None and posterior.record.is_exact
        raise ValueError(
            f"Sites are those of a Gaussian fit, and this is {posterior.kind}. "
            + (
                "The Gaussian fit that it began from has some: approx.gaussian.sites(). For predictive densities under "
                "the exact posterior take pm.compute_log_likelihood on draws, and arviz.loo."
                if exact
                else "Fit with posterior='gaussian', and without reparam."
            )
        )
    return cast(GaussianState, q)


def observed_name(posterior: Posterior, var_name: str | None) -> str:
    """Return the observed variable that is asked for; raise ValueError where that is none, or several."""
    names = [str(rv.name) for rv in posterior.model.observed_RVs]
    if not names:
        rows = ", and which rows a pm.Potential is made of is not known: write it as a pm.CustomDist(..., observed=)"
        raise ValueError(f"The model has no observed variable{rows * bool(posterior.model.potentials)}.")
    if var_name is None and len(names) == 1:
        return names[0]
    if var_name not in names:
        several = "Several variables are observed: say which, by var_name"
        asked = several if var_name is None else f"No observed variable is called {var_name!r}"
        raise ValueError(f"{asked}; there are {', '.join(map(repr, names))}.")
    return var_name


def _sites_of(found: ObservedRows, q: GaussianState) -> Iterator[RowSites]:
    """Return the sites of each kind of rows."""
    linear = found.linear_map
    pairs = [kind.rows.index[:, [a, b]] for kind in found.kinds for a in range(kind.rows.k) for b in range(a + 1)]
    maps = ManyMaps.of(linear)
    entries = Entries(maps.sparsity, maps.columns, pairs)
    values = linear.covariances(q, entries.rows, entries.cols)[None]
    covariances = iter(entries.of(maps).covariances(values))
    eta = linear(q.location[None])[0]
    for kind in found.kinds:
        k = kind.rows.k
        cov = np.empty((len(kind.elements), k, k))
        for a in range(k):
            for b in range(a + 1):
                cov[:, a, b] = cov[:, b, a] = next(covariances)
        yield row_sites(kind.rows, eta[kind.rows.index], cov)


def _of_linear_predictor(kind: ObservedKind, of_rows: RowSites) -> dict[str, Array]:
    """Return moments, site and cavity of the linear predictor of each row."""
    assert kind.linear is not None
    function, along, slope = kind.linear.function, kind.linear.along, kind.linear.slope
    mean, variance = site_moments(function, of_rows.mean, of_rows.cov)
    cavity_mean, cavity_variance = site_moments(function, of_rows.cavity_mean, of_rows.cavity_cov)
    alpha, gamma = of_rows.grad[:, along] / slope, -of_rows.hessian[:, along, along] / slope**2
    unclear = ~of_rows.are_free | (of_rows.cov[:, along, along] == 0.0)
    alpha[unclear] = gamma[unclear] = np.nan
    step = np.divide(alpha, gamma, out=np.full_like(alpha, np.nan), where=gamma > 0.0)
    return {
        "mean": mean,
        "variance": variance,
        "alpha": alpha,
        "gamma": gamma,
        "natural": alpha + gamma * mean,
        "pseudo_observation": mean + step,
        "cavity_mean": cavity_mean,
        "cavity_variance": cavity_variance,
    }


def _dataset(posterior: Posterior, name: str, shape: tuple[int, ...], values: dict[str, Array]) -> xr.Dataset:
    dims, coords = axes_of(posterior.model, name, shape, leading=True)
    attrs = {
        "var_name": name,
        **elpd_attrs(values["log_density"]),
        "n_missing": int(np.isnan(values["log_density"]).sum()),
        "n_influential": int((values["influence"] > INFLUENTIAL).sum()),
    }
    data = {key: (dims, value.reshape(shape)) for key, value in values.items()}
    return xr.Dataset(data, coords=coords, attrs=attrs)
