"""The models of the battery: name -> how it is built and fitted, the least that is to come of it, and what is known."""

import functools
import json

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import exact_models
import functionals_models
import functionals_references
import modes_models
import numpy as np
import posteriors_models
import posteriors_unstructured
import rows_models
import scans_models
import users_models

from measure import coordinate_names, unconstrain
from users_models import IMPROPER, SAMPLED_AS, SEVERAL_MODES, TWINS

from battery import closed
from battery.known import Known, quantities

GAUSSIAN, APPROXIMATE, EXACT = range(3)
_HERE = Path(__file__).parent
_MODES = Path(modes_models.__file__).with_name("modes_references.json")
#: Effective size that is assumed of moments of which none was written: NUTS of 8 chains of 2,000 draws.
_UNWRITTEN = 2_000.0


@dataclass(frozen=True)
class Entry:
    """A model.

    ``least`` is the least kind of posterior that is to come of it. ``is_reliable`` is the verdict that it is to get;
    None where a refusal is right, too. ``known()`` is what is compared with, None without a posterior; ``columns`` are
    draws (n, k) and names of what it knows, from what was sampled and the model.
    """

    build: Callable
    known: Callable | None
    columns: Callable
    least: int = EXACT
    is_reliable: bool | None = True
    options: dict = field(default_factory=dict)


# --- references by long runs of NUTS, in this folder ------------------------------------------------------------------


@functools.cache
def _store():
    with np.load(_HERE / "references.npz") as file:
        return dict(file)


def _stored(name, build, **options):
    def known():
        if f"{name}/mean" not in _store():
            return _of_users(name)
        known = Known.from_store(_store(), name)
        return replace(known, evidence=np.full(2, np.nan)) if name in _NO_EVIDENCE else known

    def columns(posterior, model):
        draws, names, _ = quantities(posterior, model)
        if f"{name}/mean" in _store():
            return draws, names
        model = TWINS[name]() if name in TWINS else model
        return unconstrain(posterior, model), coordinate_names(model)

    return Entry(build, known, columns, **options)


def _of_users(name):
    """What NUTS knows of unconstrained coordinates: moments, and the least effective size; None where nothing is."""
    with np.load(Path(users_models.__file__).with_name("references.npz")) as file:
        if f"{name}/mean" not in file:
            return None
        names, mean, sd, (size, _) = (file[f"{name}/{part}"] for part in ("names", "mean", "sd", "quality"))
    return Known.exactly(names, mean, sd, size=size)


_BUILT = {
    **{name: build for name, (_, build) in users_models.MODELS.items() if name not in (*IMPROPER, *SEVERAL_MODES)},
    **{f"size: {build.__name__}": build for build in (posteriors_models.linear, posteriors_models.growth)},
    **{
        f"no structure: {name}": posteriors_unstructured.UNSTRUCTURED[name]
        for name in ("rare_events", "epidemic", "near_binomial")
    },
    "no structure: 40 coefficients": exact_models.dense_regression,
    "scan: kalman": scans_models.by_numbers,
    "kink: asymmetric laplace": rows_models.quantile,
    "kink: laplace prior": rows_models.lasso_fixed,
    "kink: laplace prior, its scale unknown": rows_models.lasso,
}
#: Models without a marginal likelihood: an improper prior, an order that cuts off a part of it, or a Potential of
#: any scale; and those with an LKJ prior, whose constant has the wrong sign in PyMC, by which the references were made.
_NO_EVIDENCE = (
    "regression: children flat", "regression: ordered logit", "structured: normal mixture", "structured: hidden markov",
    "counts and survival: occupancy", "scan: kalman", "structured: several outcomes", "size: growth",
)  # fmt: skip
#: What is called exact and is wrong today, with the seed that is tried: each is to be mended, and its line to go.
WRONG: dict[str, str] = {}
#: Models of which less than an exact posterior is to come.
_LEAST = {
    "regression: poisson two parameters": GAUSSIAN,
    "regression: horseshoe": APPROXIMATE,
    "structured: minibatch": GAUSSIAN,
    "crossed, not centred, high counts": APPROXIMATE,
    "no structure: rare_events": APPROXIMATE,
    "groups: two parameter items": APPROXIMATE,  # 20 globals: thin tails, and no other pool is tried
    "no structure: near_binomial": APPROXIMATE,  # its rows are not known to be concave: nested, and nearly exact
    "no structure: 40 coefficients": GAUSSIAN,
}


def _by_nuts(name):
    """Return what makes the model whose quantities are asked for, the one that is sampled, and what draws become."""

    def written(build):
        if name in SAMPLED_AS:
            other, moved = SAMPLED_AS[name]
            return build(), other(), moved
        model = TWINS.get(name, build)()
        return model, model, lambda posterior: posterior

    return functools.partial(written, _BUILT[name])


TOLD_BY_NUTS = {name: _by_nuts(name) for name in _BUILT}


# --- references of the benchmarks, and closed forms -------------------------------------------------------------------


def _of_functionals(name, **options):
    def known():
        found = functionals_references.Summary.read(functionals_references.file_of(name))
        found, k = found.only(found.varies), int(found.varies.sum())
        limits = np.tile(functionals_references.LIMITS, (k, 1)).T
        return Known(
            np.array(found.names), found.mean, found.sd, found.low, found.high, found.kurtosis, found.size,
            found.size_of_sd, found.size, limits, np.empty((0, 2), dtype=int), np.full(2, np.nan),
        )  # fmt: skip

    def columns(posterior, model):
        return functionals_references.flattened(posterior, model)[:2]

    return Entry(lambda: functionals_models.model_of(name), known, columns, **options)


def elements(posterior, model):
    """Draws of all elements of all variables of a model."""
    columns, names = [], []
    for variable in (*model.free_RVs, *model.deterministics):
        values = posterior[variable.name].to_numpy()
        values = values.reshape(values.shape[0] * values.shape[1], -1)
        columns.append(values)
        names += [f"{variable.name}[{i}]" for i in range(values.shape[1])]
    return np.concatenate(columns, axis=1), names


def from_moments(moments, size=np.inf, **options):
    """Return what is known from {name: (mean, sd)} or {name: (mean, sd, low, high)}, arrays of a variable's shape."""
    names = [f"{name}[{i}]" for name, parts in moments.items() for i in range(np.size(parts[0]))]
    parts = [np.concatenate([np.ravel(p) for p in part]) for part in zip(*moments.values(), strict=True)]
    return Known.exactly(names, *parts, size=size, **options)


def _of_modes(name, **options):
    case = modes_models.CASES[name]

    def known():
        if case.moments is not None:
            return from_moments(case.moments())
        return from_moments(json.loads(_MODES.read_text())[name], _UNWRITTEN)

    return Entry(case.build, known, elements, **options)


def _schools(centred):
    def known():
        answer = exact_models.schools_answer(centred)
        names = coordinate_names(exact_models.schools(centred))
        return Known.exactly(names, answer.mean, answer.sd, evidence=(answer.log_evidence, 0.0))

    def columns(posterior, model):
        return unconstrain(posterior, model), coordinate_names(model)

    return Entry(lambda: exact_models.schools(centred), known, columns)


_SEVERAL = (
    "two exponentials, ordered", "two exponentials", *(f"sinusoid {i}" for i in modes_models.SINUSOIDS),
    "two modes 3 sd apart, 0.5", "two modes 4 sd apart, 0.8, from the other",
    "two modes 6 sd apart, 0.6, from the other",
    "two modes 8 sd apart, 0.8, from the other", "two modes 10 sd apart, 0.5",
    "two modes 10 sd apart, 0.95, from the other", "y = u^2", "y = u^2, off centre", "factor signs",
    "mixture, ordered", "mixture", "structured: label switching", "structured: factor analysis",
)  # fmt: skip
#: Posteriors with several modes of which it is enough to name them.
_MAY_BE_REFUSED = ("sinusoid 5", "structured: factor analysis")

MODELS: dict[str, Entry] = {
    **{name: _stored(name, build, least=_LEAST.get(name, EXACT)) for name, build in _BUILT.items()},
    **{
        f"functionals: {name}": _of_functionals(name, least=_LEAST.get(name, EXACT))
        for name in functionals_models.MODELS
    },
    **{
        f"modes: {name}": _of_modes(
            name,
            is_reliable=None if name in _MAY_BE_REFUSED else True,
            least=GAUSSIAN if name in _MAY_BE_REFUSED else EXACT,
        )
        for name in _SEVERAL
    },
    **{
        f"size: {build.__name__}": Entry(build, None, elements, APPROXIMATE)  # to be timed
        for build in (posteriors_models.slopes, posteriors_models.own_effects, posteriors_models.crossed)
    },
    "grid: eight schools centred": _schools(True),
    "grid: eight schools noncentred": _schools(False),
    **{
        name: Entry(build, functools.partial(lambda known: from_moments(**known()), known), elements, least)
        for name, (build, known, least) in closed.MODELS.items()
    },
    **{name: Entry(users_models.MODELS[name][1], None, elements, GAUSSIAN, is_reliable=False) for name in IMPROPER},
}

#: What the default suite runs: a third, the quick ones, of every kind.
QUICK = (
    "regression: earnings on height", "regression: house prices", "regression: robust", "regression: laplace errors",
    "regression: logistic", "regression: logistic rare", "regression: poisson two parameters",
    "regression: variance function", "regression: seven points", "regression: separated normal",
    "regression: separated flat", "groups: bambi bernoulli", "groups: bambi not noncentred",
    "groups: eight schools noncentred", "groups: radon", "groups: meta analysis", "groups: centred many zeros",
    "counts and survival: weibull censored", "counts and survival: frailty", "counts and survival: negative binomial",
    "counts and survival: capture recapture", "counts and survival: dose response", "series and fields: local level",
    "series and fields: autoregression", "series and fields: seasonal", "series and fields: changepoint",
    "structured: dims regression", "structured: custom density", "structured: imputed predictor",
    "structured: flat alone", "functionals: random intercepts, logistic",
    "functionals: random intercepts, negative binomial, offset", "functionals: crossed, centred, low counts",
    "functionals: local level, much noise", "functionals: random walk, Poisson", "functionals: measurement error",
    "functionals: Bambi, hsgp", "modes: two exponentials", "modes: two modes 6 sd apart, 0.6, from the other",
    "modes: two modes 10 sd apart, 0.95, from the other", "modes: y = u^2", "modes: y = u^2, off centre",
    "grid: eight schools centred", "closed: beta-binomial", "closed: gamma-Poisson", "closed: line", "grid: scale",
    "grid: groups", "no structure: rare_events",
)  # fmt: skip
