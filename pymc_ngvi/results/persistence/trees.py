"""An approximation as a tree of xarray, and as what a pickle needs of its fit."""

import dataclasses

import numpy as np
import xarray as xr

from pymc_ngvi.core.psis import Weights
from pymc_ngvi.density import Layout
from pymc_ngvi.fitting.saved import SavedFit
from pymc_ngvi.results.convert import flat_dataset
from pymc_ngvi.results.diagnosis import Diagnosis, Finding
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.persistence.content import (
    APPROXIMATION,
    FIT,
    UNCONSTRAINED,
    Content,
    content_of_generator,
    content_of_q,
    damaged,
    group_of,
    readable,
    versions,
)
from pymc_ngvi.results.persistence.encoding import DamagedError
from pymc_ngvi.results.persistence.matching import SavedData, fingerprints, free_variables


def add_to_tree(tree: xr.DataTree, approx: Fitted, *, resumable: bool) -> xr.DataTree:
    """Add groups to a tree that `pymc_ngvi.load` makes an approximation of; see `NGVIApproximation.to_datatree`."""
    posterior, fitted = approx._posterior, approx._gaussian or approx
    tree[APPROXIMATION] = xr.DataTree(group_of(_content(approx), inline=False, attrs=readable(posterior)))
    if resumable and fitted._session is not None:
        content = {"snapshot": fitted._session.snapshot(), "log_p": _log_p_at_mean(fitted)}
        tree[FIT] = xr.DataTree(group_of(content, inline=True))
    moments = np.stack([posterior.distribution.mean(), posterior.distribution.sd()])
    tree[UNCONSTRAINED] = xr.DataTree(flat_dataset(approx.layout, moments, {"moment": ["mean", "sd"]}))
    tree.attrs |= versions()
    return tree


def _content(approx: Fitted) -> dict[str, object]:
    content = {
        **_content_of_fit(approx),
        "variables": free_variables(approx.model, approx.layout),
        "data": approx._data.saved if isinstance(approx._data, SavedData) else fingerprints(approx.model),
        "backend": approx.density.backend,
    }
    if approx._next_step is not None:
        gaussian = None if approx._gaussian is None else _content_of_fit(approx._gaussian)
        content |= {"gaussian": gaussian, "exact_step": approx._next_step}
    return content


def _content_of_fit(approx: Fitted) -> dict[str, object]:
    kept = approx._kept
    return {
        "q": content_of_q(approx._state, approx.record),
        "record": approx.record,
        "diagnosis": None if kept.diagnosis is None else _content_of_diagnosis(kept.diagnosis),
        "share": None if kept.diagnosis is None else kept.share,
        "hist": approx.hist,
        "gap_hist": approx.gap_hist,
        "generator": content_of_generator(approx._rng),
        "include_transformed": approx.include_transformed,
    }


def restore(approx: Fitted, name: str, content: Content, fit: Content | None) -> None:
    """Give an approximation what a file holds beside q; the diagnosis only where the data are those of the fit."""
    approx.record, approx.hist, approx.gap_hist = content["record"], content["hist"], content["gap_hist"]
    approx._data = approx.density.info.data
    approx._session = None if fit is None else SavedFit(approx.density, approx._state, fit["snapshot"], fit["log_p"])
    if not approx._data.changed() and content["diagnosis"] is not None:
        with damaged(name):
            kept = approx._kept
            kept.diagnosis, kept.share = _diagnosis_of(content["diagnosis"], approx.layout), content["share"]


def resumable_fit(approx: Fitted) -> SavedFit | None:
    """Return what the fit needs to go on, without what can be made again."""
    session = approx._session
    if session is None or (isinstance(session, SavedFit) and session.is_idle):
        return session
    return SavedFit(approx.density, approx._state, session.snapshot(), _log_p_at_mean(approx))


def _log_p_at_mean(approx: Fitted) -> float | None:
    """Return log p at the mean of q, which tells models apart that differ in a prior; None where that takes a pass."""
    if isinstance(approx._session, SavedFit) and approx._session.is_idle:
        return approx._session.log_p
    if approx.density.why_in_part or approx.density.is_streamed or approx._data.changed():
        return None
    return float(approx.density.logp(approx._distribution.mean()[None])[0])


def _content_of_diagnosis(diagnosis: Diagnosis) -> Content:
    """Return the fields, findings and weights as tuples; the layout is that of the model."""
    content = {f.name: getattr(diagnosis, f.name) for f in dataclasses.fields(diagnosis) if f.name != "layout"}
    findings = tuple(dataclasses.astuple(finding) for finding in diagnosis.findings)
    return {**content, "findings": findings, "weights": tuple(diagnosis.weights)}


def _diagnosis_of(content: Content, layout: Layout) -> Diagnosis:
    """Return the diagnosis: the inverse of `_content_of_diagnosis`; raise DamagedError for what is none."""
    findings = tuple(Finding(*fields) for fields in content["findings"])
    if any((type(f.text), type(f.cure), type(f.serious)) != (str, str, bool) for f in findings):
        raise DamagedError("what it has as findings is something else")
    if any(np.shape(column) != (layout.n_dim,) for column in content["by_coordinate"].values()):
        raise DamagedError("the diagnosis is of another number of coordinates")
    parts = {"findings": findings, "weights": Weights(*content["weights"]), "layout": layout}
    return Diagnosis(**{**content, **parts})
