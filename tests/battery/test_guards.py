"""Each guard of `marginal/` and `nested/` has a model that is right with it, and wrong or refused without it."""

import functools

import pytest

from battery.guards import APPROXIMATE, EXACT, GUARDS, MODELS, REFUSED, result_of

pytestmark = pytest.mark.battery

#: What is claimed, the least first; how far off what is approximate may be, as a multiple of what is exact.
CLAIMS, ROUGH = [REFUSED, APPROXIMATE, EXACT], 2.0
WITH_MODEL = {name: guard for name, guard in GUARDS.items() if guard.model}

known = functools.cache(lambda name: MODELS[name]())


@functools.cache
def with_all(model, kind, seed):
    return result_of(known(model), kind, seed)


def is_right(result, claim):
    """Tell whether a fit claims as much as it should, no more, and is not off by more than it says."""
    if result.claim != claim:
        return False
    return claim == REFUSED or result.off < (1.0 if claim == EXACT else ROUGH)


@pytest.mark.parametrize("name", WITH_MODEL)
def test_it_is_right_with_the_guard(name):
    guard = GUARDS[name]
    assert is_right(result := with_all(guard.model, guard.kind, guard.seed), guard.claim), result


@pytest.mark.parametrize("name", WITH_MODEL)
def test_it_is_wrong_without_the_guard(name, monkeypatch):
    guard = GUARDS[name]
    for owner, attribute, other in guard.off:
        monkeypatch.setattr(owner, attribute, other)
    result = result_of(known(guard.model), guard.kind, guard.seed)
    assert not is_right(result, guard.claim), result
    # More is claimed than is right, or less than could be.
    assert CLAIMS.index(result.claim) < CLAIMS.index(guard.claim) or result.off > 1.0, result


@pytest.mark.parametrize("name", GUARDS)
def test_it_has_a_model_or_what_was_tried(name):
    """What is switched off is there: a guard that goes leaves the table."""
    guard = GUARDS[name]
    assert bool(guard.model) != bool(guard.tries)
    for owner, attribute, _ in guard.off:
        assert hasattr(owner, attribute)
