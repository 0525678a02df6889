"""The registry: defaults, refusals, and no row that leads nowhere."""

import itertools

import pytest

from matrix import COMBINATIONS

from pymc_ngvi.registry import ALLOWED, AXES, Choice, choose, suggestion


def test_the_default_is_the_first_row():
    assert choose(family=None, update=None, estimator=None, step=None) == Choice(*ALLOWED[0])
    assert choose() == Choice("full", "natural", "price", "adaptive")


@pytest.mark.parametrize("choice", COMBINATIONS, ids=str)
def test_every_row_can_be_chosen_in_full(choice):
    assert choose(**vars(choice)) == choice
    assert all(name in AXES[axis] for axis, name in vars(choice).items())


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis in AXES for name in AXES[axis]])
def test_every_entry_can_be_chosen_alone(axis, name):
    """One axis is enough: the rest is filled in from the first row that agrees."""
    expected = next(Choice(*row) for row in ALLOWED if dict(zip(AXES, row, strict=True))[axis] == name)
    assert choose(**{axis: name}) == expected


def test_combinations_outside_the_table_are_refused():
    # Rows disagree with each other in some axis: mixing them without leave must not be possible.
    for names in itertools.product(*AXES.values()):
        if names not in ALLOWED:
            with pytest.raises(ValueError, match="don't go together"):
                choose(**dict(zip(AXES, names, strict=True)))


def test_a_combination_that_is_not_allowed_names_the_ones_that_are(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.registry.ALLOWED", (("full", "natural", "price", "adaptive"),))
    with pytest.raises(ValueError, match=r"family='diagonal', step='adaptive' don't go together.*full, natural, price"):
        choose(family="diagonal", step="adaptive")


@pytest.mark.parametrize("axis", AXES)
def test_an_unknown_name_lists_the_valid_ones(axis):
    with pytest.raises(ValueError, match=rf"Unknown {axis} 'nonsense'") as caught:
        choose(**{axis: "nonsense"})
    assert all(repr(name) in str(caught.value) for name in AXES[axis])


def test_the_nearest_name_is_suggested():
    with pytest.raises(ValueError, match=r"did you mean 'diagonal'\?"):
        choose(family="diagnoal")
    assert suggestion("zzz", ["a", "b"]) == "Valid: 'a', 'b'."
