"""The registry: defaults, refusals, and no row that leads nowhere."""

import itertools
import re

import pytest

from matrix import COMBINATIONS

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.fitting.registry import ALLOWED, AXES, RULES, Choice, choose, stochastic_step

#: Every choice of a name, or of none, on each axis.
PARTIAL = [
    dict(zip(AXES, names, strict=True)) for names in itertools.product(*([None, *axis] for axis in AXES.values()))
]


def agreeing(chosen):
    """Return the rows that have all that was chosen, in their order."""
    return [
        choice
        for choice in COMBINATIONS
        if all(name in (None, choice.given().get(axis)) for axis, name in chosen.items())
    ]


def refusal(chosen):
    """Return what is said of names that don't go together."""
    with pytest.raises(ValueError, match="don't go together") as caught:
        choose(**chosen)
    return str(caught.value)


def test_the_default_is_the_first_row():
    assert choose(family=None, update=None, estimator=None, step=None) == Choice(*ALLOWED[0])
    assert choose() == Choice("full", "natural", "price", "adaptive")


@pytest.mark.parametrize("choice", COMBINATIONS, ids=str)
def test_every_row_can_be_chosen_in_full(choice):
    assert choose(**choice.given()) == choice
    assert all(name in (AXES[axis] if axis != "step" else RULES) for axis, name in vars(choice).items())


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis in AXES for name in AXES[axis]])
def test_every_entry_can_be_chosen_alone(axis, name):
    """One axis is enough: the rest is filled in from the first row that agrees."""
    expected = next(Choice(*row) for row in ALLOWED if dict(zip(AXES, row, strict=True))[axis] == name)
    assert choose(**{axis: name}) == expected


@pytest.mark.parametrize("name", AXES["family"])
def test_second_order_natural_gradients_are_the_default_of_every_family(name):
    assert choose(family=name) == Choice(name, "natural", "price", FAMILIES[name].traits.own_rule or "adaptive")


@pytest.mark.parametrize(("name", "family"), [("trust_region", "mixture"), ("scale_mixture", "student_t")])
@pytest.mark.parametrize("named", [True, False])
def test_a_rule_that_a_family_implies_is_no_option(name, family, named):
    """Nor is another rule for that family."""
    with pytest.raises(ValueError, match=rf"step='{name}' is the rule of family='{family}', which implies it"):
        choose(step=name, family=family if named else None)
    assert choose(family=family).step == name
    assert "step" not in choose(family=family).given()
    assert "leave step out" in refusal({"family": family, "step": "adaptive"})


def test_every_rule_is_an_option_or_implied_by_one_family():
    own = [family.traits.own_rule for family in FAMILIES.values() if family.traits.own_rule]
    assert sorted([*AXES["step"], *own]) == sorted(RULES)


@pytest.mark.parametrize(
    ("chosen", "row"),
    [
        ({"update": "natural_pd"}, ("full", "natural_pd", "price", "adaptive")),
        ({"update": "cholesky"}, ("full", "cholesky", "price", "adaptive")),
        ({"update": "cholesky_precision"}, ("full", "cholesky_precision", "price", "adaptive")),
        ({"update": "sqrt"}, ("full", "sqrt", "price", "adaptive")),
        ({"update": "euclidean"}, ("full", "euclidean", "pathwise", "adam")),
        ({"estimator": "pathwise", "step": "snngm"}, ("full", "cholesky", "pathwise", "snngm")),
        ({"estimator": "pathwise"}, ("full", "cholesky", "pathwise", "snngm")),
        ({"estimator": "gauss_newton"}, ("diagonal", "natural", "gauss_newton", "decay")),
        ({"family": "block", "estimator": "gauss_newton"}, ("block", "natural", "gauss_newton", "decay")),
        ({"step": "adam"}, ("full", "euclidean", "pathwise", "adam")),
        ({"step": "sgd"}, ("full", "euclidean", "pathwise", "sgd")),
        ({"step": "decay"}, ("full", "natural", "price", "decay")),
        ({"step": "proximal"}, ("full", "natural", "price", "proximal")),
        ({"step": "constant"}, ("full", "natural", "price", "constant")),
        ({"step": "snngm", "family": "block"}, ("block", "cholesky", "pathwise", "snngm")),
        ({"step": "snngm", "family": "sparse"}, ("sparse", "cholesky_precision", "pathwise", "snngm")),
        ({"family": "sparse", "estimator": "pathwise"}, ("sparse", "cholesky_precision", "pathwise", "snngm")),
        ({"family": "sparse", "update": "euclidean"}, ("sparse", "euclidean", "pathwise", "adam")),
    ],
    ids=str,
)
def test_what_is_left_open_is_what_the_papers_have(chosen, row):
    assert choose(**chosen) == Choice(*row)


def test_every_choice_is_filled_in_by_the_first_row_that_agrees_or_refused_with_a_reason():
    """However many axes are named; the sentence for those that nothing is known of is never needed."""
    for chosen in PARTIAL:
        rows = agreeing(chosen)
        if rows:
            assert choose(**chosen) == rows[0]
            continue
        message = refusal(chosen)
        assert "no row of" not in message, chosen
        assert all(f"{axis}={name!r}" in message for axis, name in chosen.items() if name is not None)
        assert message.endswith(".")


def test_what_a_refusal_advises_exists():
    """Names in the reasons are valid, and each reason tells of something else to take."""
    for chosen in PARTIAL:
        if agreeing(chosen):
            continue
        reason = refusal(chosen).split("don't go together: ")[1]
        for axis, name in re.findall(r"(\w+)='(\w+)'", reason):
            assert name in AXES[axis], reason
            assert name != chosen[axis] or reason.endswith("leave step out."), reason


def test_what_a_refusal_advises_leads_somewhere():
    """Taking the first advice of each refusal, and so on, ends at a row."""
    for names in itertools.product(*AXES.values()):
        chosen = dict(zip(AXES, names, strict=True))
        for _ in range(4):
            if agreeing(chosen):
                break
            advice = refusal(chosen).split("go together: ")[1]
            if advice.endswith("leave step out."):
                chosen = {**chosen, "step": None}
                continue
            axis, name = re.search(r"(\w+)='(\w+)'", advice).groups()
            chosen = {**chosen, axis: name}
        assert agreeing(chosen), names


@pytest.mark.parametrize(
    ("chosen", "advice"),
    [
        ({"update": "cholesky"}, "take update='cholesky_precision'"),
        ({"update": "sqrt"}, "take update='cholesky_precision'"),
        ({"update": "natural_pd"}, "take update='natural'"),
        ({"step": "decay"}, "take step='constant' or 'proximal'"),
        ({"estimator": "gauss_newton"}, "take family='diagonal'"),
    ],
    ids=str,
)
def test_what_the_sparse_family_lacks_is_told_with_what_takes_its_place(chosen, advice):
    """Nothing that would fill the precision in: each reason is the one of this family, not of another pair."""
    assert advice in refusal({"family": "sparse", **chosen})


def test_combinations_outside_the_table_are_refused():
    refused = [names for names in itertools.product(*AXES.values()) if names not in ALLOWED]
    assert refused
    for names in refused:
        refusal(dict(zip(AXES, names, strict=True)))


def test_a_refusal_without_a_reason_names_the_table(monkeypatch):
    only = [Choice("full", "natural", "price", "adaptive")]
    monkeypatch.setattr("pymc_ngvi.fitting.registry._CHOICES", only)
    with pytest.raises(ValueError, match=r"family='diagonal', step='adaptive' don't go together: no row of .*ALLOWED"):
        choose(family="diagonal", step="adaptive")


@pytest.mark.parametrize(
    ("chosen", "step"),
    [
        ({}, "decay"),
        ({"family": "block"}, "decay"),
        ({"family": "sparse"}, "proximal"),
        ({"update": "natural_pd"}, "constant"),
        ({"update": "cholesky"}, "snngm"),
        ({"update": "sqrt"}, "constant"),
        ({"update": "euclidean"}, "adam"),
        ({"estimator": "gauss_newton"}, "decay"),
        ({"step": "sgd"}, "sgd"),
        ({"step": "adaptive"}, None),
        ({"family": "diagonal", "update": "cholesky_precision"}, None),
    ],
    ids=str,
)
def test_step_rule_for_data_that_change(chosen, step):
    assert stochastic_step(**chosen) == step


@pytest.mark.parametrize("axis", AXES)
def test_an_unknown_name_lists_the_valid_ones(axis):
    with pytest.raises(ValueError, match=rf"Unknown {axis} 'nonsense'") as caught:
        choose(**{axis: "nonsense"})
    assert all(repr(name) in str(caught.value) for name in AXES[axis])


def test_the_nearest_name_is_suggested():
    with pytest.raises(ValueError, match=r"did you mean 'diagonal'\?"):
        choose(family="diagnoal")
    assert suggestion("zzz", ["a", "b"]) == "Valid: 'a', 'b'."
