"""Which terms stand against a marginal likelihood."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import fit_ngvi, normalised
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


def test_a_free_scale_within_an_icar_gives_one_warning():
    """PyMC's density has no factor sigma**-(n - 1): the fit is of that density, and exact."""
    with pm.Model() as model:
        field = pm.ICAR("x", W=1 - np.eye(3, dtype=int), sigma=pm.HalfNormal("s"))
        pm.Normal("y", field, 1.0, observed=np.zeros(3))
    with pytest.warns(UserWarning, match=r"The sigma of pm\.ICAR \('x'\) is a parameter.* sigma \* pm\.ICAR") as caught:
        fit_ngvi(model, random_seed=1, progressbar=False)
    assert [w.filename for w in caught] == [__file__]
