"""Models of ``functionals.py``, each with the quantities that its user would look at as Deterministics.

They are small, so that NUTS is quick; data are simulated, each with a seed of its own.
"""

from collections.abc import Callable
from functools import partial

import functionals_fields as fields
import functionals_groups as groups
import functionals_rest as rest
import functionals_series as series
import pymc as pm

#: Local levels, whose posterior is known by an integral: the standard deviation of their noise.
NOISE = {"local level, much noise": 0.5, "local level, little noise": 0.1}
#: In the order of the table.
MODELS: dict[str, Callable[..., pm.Model]] = {
    "random intercepts, logistic": groups.intercepts_logistic,
    "random intercepts, Poisson": groups.intercepts_poisson,
    "random intercepts, negative binomial, offset": groups.intercepts_negative_binomial,
    "intercept and slope, LKJ, centred": partial(groups.slopes, centred=True),
    "intercept and slope, LKJ, not centred": partial(groups.slopes, centred=False),
    "nested groups, own effects": groups.nested_groups,
    "crossed, centred, low counts": partial(groups.crossed, centred=True, level=0.5),
    "crossed, not centred, low counts": partial(groups.crossed, centred=False, level=0.5),
    "crossed, centred, high counts": partial(groups.crossed, centred=True, level=5.0),
    "crossed, not centred, high counts": partial(groups.crossed, centred=False, level=5.0),
    **{name: partial(series.local_level, noise=noise) for name, noise in NOISE.items()},
    "random walk, Poisson": series.walk_poisson,
    "spline": series.spline,
    "trend and season": series.trend_and_season,
    "volatility, normal, walk": partial(series.volatility, tails=False, stationary=False),
    "volatility, normal, AR(1)": partial(series.volatility, tails=False, stationary=True),
    "volatility, Student-t, walk": partial(series.volatility, tails=True, stationary=False),
    "volatility, Student-t, AR(1)": partial(series.volatility, tails=True, stationary=True),
    "gp.Latent, Poisson": fields.gp_poisson,
    "gp.Latent, Bernoulli": fields.gp_bernoulli,
    "gp.Latent, binomial of 200": fields.gp_binomial,
    "gp.Latent, plane": fields.gp_plane,
    "gp.Latent, centred": partial(fields.gp_poisson, centred=True),
    "gp.Latent, offset": fields.gp_offset,
    "posteriordb, gp_pois_regr": fields.gp_pois_regr,
    "two additive GPs": fields.gp_additive,
    "hierarchical GPs": fields.gp_hierarchical,
    "HSGP": fields.hsgp,
    "Bambi, hsgp": fields.bambi_hsgp,
    "BYM2": fields.bym2,
    "CAR": fields.car,
    "negative binomial regression": rest.negative_binomial,
    "censored survival": rest.survival,
    "marketing mix": rest.marketing,
    "ordinal": rest.ordinal,
    "measurement error": rest.measurement_error,
    "2PL": rest.two_parameters,
}
#: Models of which it is enough not to be called reliable where they are not.
MAY_FAIL = ("two additive GPs", "hierarchical GPs", "marketing mix", "2PL")
#: Models with the posterior of another one, whose reference has all that they ask for.
TWINS = {"gp.Latent, centred": "gp.Latent, Poisson"}
#: Models that NUTS samples in their other form: centred where data say much, not centred where they say little.
_SWAPPED = (
    "random intercepts, Poisson", "intercept and slope, LKJ, not centred", "crossed, centred, low counts",
    "crossed, not centred, high counts", "random walk, Poisson", "volatility, normal, walk",
    "volatility, normal, AR(1)", "volatility, Student-t, walk", "volatility, Student-t, AR(1)",
)  # fmt: skip
#: Models that NUTS samples with a diagonal mass matrix: a fuller one does worse where scales are hardly known.
DIAGONAL = ("nested groups, own effects", "trend and season", "HSGP", "Bambi, hsgp")


def model_of(name: str) -> pm.Model:
    """Return a model as its user writes it."""
    return MODELS[name]()


def for_nuts(name: str) -> pm.Model:
    """Return a model with the same posterior, which has all variables of `model_of` among its own."""
    return MODELS[name](swapped=True) if name in _SWAPPED else MODELS[name]()
