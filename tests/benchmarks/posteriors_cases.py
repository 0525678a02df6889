"""The models of ``posteriors.py``: how each is built, what else fits it, and what its posterior is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import functionals_fields
import glmmtmb
import inla_models
import nested_models
import posteriors_models as models
import posteriors_unstructured as unstructured
import pymc as pm
import rows_models
import sparse_models

from functionals_references import Summary
from isolated import run_process
from models_glmm import random_intercept_logistic
from posteriors_exact import by_quadrature, crossed_linear

#: From the folder of the data and one for files, to what a rival reports: ``seconds`` and ``cpu`` at least.
Rival = Callable[[Path | None, Path, float], dict[str, object]]
Build = Callable[[Path | None], pm.Model]


@dataclass(frozen=True)
class Case:
    """A model.

    Parameters
    ----------
    build : callable
        From the folder of the data to the model.
    files : tuple of str
        Data sets that it needs.
    rival, rival_name : callable, str, optional
        What else fits it, in the same run.
    sampled : callable, optional
        The same posterior as NUTS samples it well.
    exact : callable, optional
        From the folder of the data to moments that are known without NUTS.
    stored : str
        Name of stored moments of coordinates by a long run of NUTS, in the order and with the names of this model.
    adaptation : str
        Of nutpie's mass matrix.
    """

    build: Build
    files: tuple[str, ...] = ()
    rival: Rival | None = None
    rival_name: str = ""
    sampled: Build | None = None
    exact: Callable[[Path | None], Summary] | None = None
    stored: str = ""
    adaptation: str = "low_rank"


def without_data(build: Callable[[], pm.Model]) -> Build:
    """Return a builder that takes a folder, and does not look into it."""
    return lambda data: build()


def _intercepts(name: str, data: Path | None) -> pm.Model:
    return random_intercept_logistic(glmmtmb.data_of(name, data))


def _by_glmmtmb(name: str, data: Path | None, folder: Path, limit: float) -> dict[str, object]:
    file = folder / "data.csv"
    glmmtmb.write_csv(glmmtmb.data_of(name, data), file)
    found = run_process(["Rscript", "--vanilla", str(glmmtmb.R_SCRIPT), str(file)], folder / "rival", limit)
    return {**found, "cpu": found.get("seconds_processor")}


def _ratings(data: Path | None, *, binary: bool) -> pm.Model:
    return sparse_models.crossed(sparse_models.ratings(_known(data), binary=binary), binary=binary)


def _by_r(method: str, data: Path | None, folder: Path, limit: float) -> dict[str, object]:
    file = folder / "ratings.csv"
    sparse_models.ratings(_known(data), binary=method != "lmer").to_csv(file, index=False)
    command = ["Rscript", "--vanilla", str(sparse_models.R_SCRIPT), str(file), method]
    found = run_process(command, folder / "rival", limit)
    return {**found, "cpu": found.get("processor_seconds")}


def _by_nutpie(build: Callable[[], pm.Model], data: Path | None, folder: Path, limit: float) -> dict[str, object]:
    return unstructured.by_nutpie(build())


def _salamanders(experiment: int, data: Path | None, *, centred: bool = True) -> pm.Model:
    return inla_models.salamander(_known(data), centred, experiment=experiment)


def _known(data: Path | None) -> Path:
    if data is None:
        raise ValueError("This model needs data: give --data, the folder that has them.")
    return data


def _with_intercepts(name: str, files: tuple[str, ...], stored: str = "") -> Case:
    return Case(
        partial(_intercepts, name), files, partial(_by_glmmtmb, name), "glmmTMB", stored=stored,
        exact=None if stored else lambda data: by_quadrature(glmmtmb.data_of(name, data)),
    )  # fmt: skip


def _simulated(build: Callable[..., pm.Model], *given: int) -> Case:
    """Return a model that NUTS samples better where it is not centred."""
    return Case(without_data(partial(build, *given)), sampled=without_data(partial(build, *given, centred=False)))


#: By the names that are given.
CASES: dict[str, Case] = {
    **{
        build.__name__: Case(without_data(build), adaptation="diag" if build is models.own_effects else "low_rank")
        for build in (models.slopes, models.own_effects, models.linear, models.crossed, models.growth)
    },
    "toenail": _with_intercepts("toenail", ("toenail.csv",), "toenail_centred"),
    "hers": _with_intercepts("hers", ("hers_glmm.csv",), "hers"),
    "groups": _with_intercepts("10000", ()),
    "insteval_linear": Case(
        partial(_ratings, binary=False), ("insteval.csv.gz",), partial(_by_r, "lmer"), "lmer",
        exact=lambda data: crossed_linear(sparse_models.ratings(_known(data), binary=False)),
    ),
    "insteval_logistic": Case(
        partial(_ratings, binary=True), ("insteval.csv.gz",), partial(_by_r, "glmmTMB"), "glmmTMB"
    ),
    "rasch": Case(without_data(partial(rows_models.rasch, 3_000, 30))),
    "2pl": Case(without_data(models.two_parameters)),
    "gp_counts": Case(without_data(functionals_fields.gp_poisson)),
    "gp_binary": Case(without_data(nested_models.gp_bernoulli)),
    "gp_1000": Case(without_data(partial(nested_models.gp_bernoulli, 1_000))),
    "volatility_500": _simulated(nested_models.volatility_walk, 500),
    "volatility_5000": _simulated(nested_models.volatility_walk, 5_000),
    "volatility_ar": _simulated(nested_models.volatility_ar),
    "ar_poisson": _simulated(nested_models.ar_poisson),
    **{
        name: Case(without_data(getattr(nested_models, name)))
        for name in ("nile", "car", "spline", "hsgp", "mvnormal")
    },
    "icar": Case(without_data(partial(sparse_models.icar, 30)), adaptation="diag"),
    **{
        f"bym2_{n}": Case(without_data(partial(nested_models.bym2, n)), adaptation="diag") for n in (100, 1_000, 3_000)
    },
    **{
        f"salamanders_{i + 1}": Case(
            partial(_salamanders, i + 1), ("salamander.csv",), sampled=partial(_salamanders, i + 1, centred=False)
        )
        for i in range(3)
    },
    "horseshoe_30": Case(without_data(partial(models.horseshoe, 30)), adaptation="diag"),
    "horseshoe_100": Case(without_data(partial(models.horseshoe, 100)), adaptation="diag"),
    "lkj_3": Case(without_data(partial(models.correlated, 3))),
    "lkj_4": Case(without_data(partial(models.correlated, 4))),
    **{
        name: Case(without_data(build), rival=partial(_by_nutpie, build), rival_name="nutpie")
        for name, build in {
            **unstructured.UNSTRUCTURED,
            "gp_additive": functionals_fields.gp_additive,
            "gp_hierarchical": functionals_fields.gp_hierarchical,
        }.items()
    },
}  # fmt: skip
