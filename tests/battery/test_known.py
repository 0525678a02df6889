"""What is compared: draws that are right pass, those that are off do not."""

import numpy as np
import pytest

from battery.known import Known

N, MEAN, SD = 20_000, np.array([3.0, -1.0, 0.5]), np.array([2.0, 0.1, 5.0])
ROOT = np.linalg.cholesky([[1.0, 0.6, 0.0], [0.6, 1.0, 0.3], [0.0, 0.3, 1.0]])
NAMES = np.array(["a[0]", "b[0]", "c[0]"])


def draws(seed):
    return MEAN + SD * (np.random.default_rng(seed).normal(size=(N, 3)) @ ROOT.T)


KNOWN = Known.of_draws(draws(1), NAMES, np.array([[0, 1], [1, 2]]), 4)


def off(change):
    x = draws(2)
    return KNOWN.wrong(change(x), NAMES, N)


def test_draws_of_the_same_law_pass():
    for seed in range(2, 12):
        assert not KNOWN.wrong(draws(seed), NAMES, N)


def _skewed(x):
    """The same means, sds and correlations, but for a longer tail of the first."""
    z = (x[:, 0] - MEAN[0]) / SD[0]
    longer = z + 0.15 * (z**2 - 1)
    x[:, 0] = MEAN[0] + SD[0] * longer / longer.std()
    return x


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: np.add(x, [0.1 * SD[0], 0, 0]), "a[0]: mean"),
        (lambda x: MEAN + (x - MEAN) * [1, 1.1, 1], "b[0]: sd"),
        (lambda x: MEAN + (x - MEAN) * [1, 1, 0.9], "c[0]: sd"),
        (lambda x: x[:, [1, 0, 2]], "a[0]: mean"),
        (lambda x: np.column_stack([np.roll(x[:, 0], 1), x[:, 1:]]), "a[0] + b[0]: sd"),
        (_skewed, "a[0]: share below the limit"),
        (lambda x: np.where(np.arange(N)[:, None] == 5, np.nan, x), "finite"),
    ],
    ids=["mean by 0.1 sd", "sd by 1.1", "sd by 0.9", "swapped", "a correlation", "skewness", "not finite"],
)
def test_draws_that_are_off_do_not(change, what):
    assert any(what in sentence for sentence in off(change)), off(change)


def test_evidence():
    known = Known.exactly(NAMES, MEAN, SD, evidence=(-12.0, 0.01))
    assert not known.wrong_evidence(-12.05, 0.01)
    assert known.wrong_evidence(-12.2, 0.01)
    assert not KNOWN.wrong_evidence(0.0, 0.01)  # not known


def test_the_store_keeps_what_is_known():
    again = Known.from_store(KNOWN.to_store("x"), "x")
    assert not again.wrong(draws(3), NAMES, N)
    np.testing.assert_allclose(again.mean, KNOWN.mean, rtol=1e-6)
