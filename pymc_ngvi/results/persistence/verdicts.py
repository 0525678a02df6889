"""The diagnosis that belongs to a fit, as plain values, and back."""

import dataclasses

import numpy as np

from pymc_ngvi.core.psis import Weights
from pymc_ngvi.model.layout import Layout
from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.findings import Finding
from pymc_ngvi.results.persistence.content import Content
from pymc_ngvi.results.persistence.encoding import DamagedError


def content_of_diagnosis(diagnosis: Diagnosis) -> Content:
    """Return the fields, findings and weights as tuples; the layout is that of the model."""
    content = {f.name: getattr(diagnosis, f.name) for f in dataclasses.fields(diagnosis) if f.name != "layout"}
    findings = tuple(dataclasses.astuple(finding) for finding in diagnosis.findings)
    return {**content, "findings": findings, "weights": tuple(diagnosis.weights)}


def diagnosis_of(content: Content, layout: Layout) -> Diagnosis:
    """Return the diagnosis: the inverse of `content_of_diagnosis`; raise DamagedError for what is none."""
    findings = tuple(Finding(*fields) for fields in content["findings"])
    if any((type(f.text), type(f.cure), type(f.serious)) != (str, str, bool) for f in findings):
        raise DamagedError("what it has as findings is something else")
    if any(np.shape(column) != (layout.n_dim,) for column in content["by_coordinate"].values()):
        raise DamagedError("the diagnosis is of another number of coordinates")
    parts = {"findings": findings, "weights": Weights(*content["weights"]), "layout": layout}
    return Diagnosis(**{**content, **parts})
