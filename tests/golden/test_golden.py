"""The package gives what it gave: kinds of rows, patterns, outcomes of fits.

The record is in ``tests/golden/record``; ``make record`` makes it anew where it is to move.
"""

import pytest

from golden import files
from golden.cases import FITS, MODELS, PAIRS

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

RECORD = {part: files.read(part) for part in files.PARTS}
#: Of the models, every third one; of the fits, short ones that each entry of the registry is in, and some to the end.
QUICK_MODELS = list(MODELS)[::3]
QUICK_FITS = (
    *PAIRS[::2], "asked for a gaussian", "too dear", "tan, table 5: cov-natural-snngm",
    "tan, table 6: gva-natural-snngm", "wu and gardner: price, plain", "sites", "vogn, batches", "weights: natural",
    "weights: as printed", "rvb1",
    "shards: grouped", "stream: counts",
)  # fmt: skip


def all_and_quick(names, quick):
    """Return parameters, those that are not quick marked as slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow, id=name) for name in names]


def assert_as_recorded(part, name):
    wrong = files.differ(part, RECORD[part][name], files.measure(part, name))
    assert not wrong, f"{part} of {name}: " + "; ".join(wrong)


@pytest.mark.parametrize("name", all_and_quick(MODELS, QUICK_MODELS))
def test_rows_and_patterns(name):
    assert_as_recorded("structure", name)


@pytest.mark.parametrize("name", all_and_quick(FITS, QUICK_FITS))
def test_fits(name):
    assert_as_recorded("fits", name)


def test_the_record_has_all_cases_and_no_others():
    for part in files.PARTS:
        assert RECORD[part].keys() == (FITS if part == "fits" else MODELS).keys()


# --- what is compared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "STALLED"),
        ("posterior", "exact"),
        ("why", "Gaussian: it is."),
        ("reason", "too_dear"),
        ("choice", ["full", "natural", "price", "adaptive", None]),
        ("n modes", 3),
        ("elbo", -1.0),
    ],
)
def test_each_outcome_of_a_fit_is_compared(name, value):
    old = RECORD["fits"]["asked for a gaussian"]
    assert old[name] != value
    assert not files.differ("fits", old, old)
    assert len(files.differ("fits", old, old | {name: value})) == 1


@pytest.mark.parametrize("name", ["mean", "sd"])
def test_a_moment_may_move_by_a_thousandth_of_an_sd(name):
    old = RECORD["fits"]["asked for a gaussian"]
    assert old["error"] == 0.0
    for part, n_wrong in ((5e-4, 0), (2e-3, 1)):
        moved = [value + part * sd for value, sd in zip(old[name], old["sd"], strict=True)]
        assert len(files.differ("fits", old, old | {name: moved})) == n_wrong
