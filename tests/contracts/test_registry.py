"""The registry: defaults, refusals, and no row that leads nowhere."""

import itertools
import re

import pytest

from matrix import COMBINATIONS

from pymc_ngvi.fitting.options import ALLOWED, AXES, Choice, choose

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


@pytest.mark.parametrize("axis", AXES)
def test_an_unknown_name_lists_the_valid_ones(axis):
    with pytest.raises(ValueError, match=rf"Unknown {axis} 'nonsense'") as caught:
        choose(**{axis: "nonsense"})
    assert all(repr(name) in str(caught.value) for name in AXES[axis])
