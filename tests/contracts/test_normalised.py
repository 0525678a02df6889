"""Which terms stand against a marginal likelihood."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import normalised
from pymc_ngvi.density.new_priors import unnormalised

ORDERED = pm.distributions.transforms.ordered


def term(kind):
    if kind == "flat":
        return pm.Flat("x")
    if kind == "half flat":
        return pm.HalfFlat("x")
    if kind == "icar":
        return pm.ICAR("x", W=np.array([[0, 1], [1, 0]]))
    if kind == "ordered":
        return pm.Normal("x", 0.0, 1.0, shape=2, transform=ORDERED, initval=[0.0, 1.0])
    return pm.Potential("x", -(pm.Normal("z") ** 2))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("flat", "improper"),
        ("half flat", "improper"),
        ("icar", "no normalising constant"),
        ("ordered", "ordering"),
        ("potential", "pymc_ngvi.normalised"),
    ],
)
def test_a_term_without_a_constant_is_named_unless_it_is_declared(kind, why):
    with pm.Model() as model:
        x = term(kind)
    (reason,) = unnormalised(model)
    assert "'x'" in reason
    assert why in reason
    assert normalised(x) is x
    assert unnormalised(model) == []


def test_proper_priors_have_nothing_against_them():
    with pm.Model() as model:
        pm.HalfNormal("s")
        pm.Dirichlet("w", np.ones(3))
        pm.Normal("y", 0.0, 1.0, observed=[1.0])
    assert unnormalised(model) == []
