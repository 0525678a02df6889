"""Refusals: a code to decide by, a sentence to read, and both in other processes."""

import pickle

import pytest

from pymc_ngvi.core.refusal import (
    NotApart,
    OtherForm,
    PatternLacks,
    PatternWidened,
    Reason,
    Refused,
    RowHessianGivenUp,
    RowsGivenUp,
    TooDenseError,
    Unavailable,
)
from pymc_ngvi.density import CannotReuse
from pymc_ngvi.density.blocks import CannotSplit
from pymc_ngvi.reading.lift import CannotLift

OF_FORMS = (PatternWidened, PatternLacks, RowsGivenUp, RowHessianGivenUp)


def test_what_is_read_is_the_sentence():
    refused = Refused(Reason.TOO_DEAR, "it takes an hour")
    assert str(refused) == refused.sentence == "it takes an hour"
    assert refused.code is Reason.TOO_DEAR


@pytest.mark.parametrize("kind", OF_FORMS)
def test_each_form_has_a_code_of_its_own(kind):
    assert [other for other in OF_FORMS if other.reason is kind.reason] == [kind]
    assert kind("why").code is kind.reason
    assert isinstance(kind("why"), OtherForm)


@pytest.mark.parametrize(
    "refused",
    [
        Refused(Reason.TOO_DENSE, "why"),
        PatternLacks("why"),
        TooDenseError("why"),
        CannotReuse("why"),
        CannotSplit("why"),
        Unavailable(Reason.TOO_LONG, "why", "exact"),
    ],
    ids=lambda refused: type(refused).__name__,
)
def test_refusals_pass_between_processes(refused):
    again = pickle.loads(pickle.dumps(refused))
    assert type(again) is type(refused)
    assert vars(again) == vars(refused)
    assert str(again) == "why"


def test_why_a_log_density_does_not_come_apart():
    assert TooDenseError().code is Reason.TOO_DENSE
    assert "too much memory" in TooDenseError().sentence
    assert issubclass(CannotLift, NotApart)
    assert len({kind.reason for kind in (NotApart, TooDenseError, CannotLift)}) == 3
