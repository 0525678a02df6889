"""Every snippet of the documentation runs, and prints what the comment beside it says."""

import re

from importlib.util import find_spec

import pytest

from texts import DOCS, blocks, run


def name_of(path):
    return path.relative_to(DOCS).with_suffix("").as_posix()


#: Pages that are run with the tests of what they are about.
RUN_ELSEWHERE = {"extending", "plots", "samplers", "saving"}
TO_RUN = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if name_of(path) not in RUN_ELSEWHERE and blocks(path.read_text(encoding="utf-8"))
]
#: Sizes in pages that take long, and what they are in the tests that are not slow: the same code on fewer data.
SMALLER = {
    "models/censored": {"200": "60"},
    "models/crossed": {"600": "120", "150": "30", "4_800": "960", "30": "12", "2_000": "300"},
}


def smaller(text, sizes):
    """Return a text with other numbers in its blocks; each that is to be replaced has to be there."""
    found = set()

    def other(number):
        found.add(number[0])
        return sizes[number[0]]

    number = re.compile(rf"(?<![\w.])({'|'.join(sizes)})(?![\w.])")
    changed = "\n".join(f"```python\n{number.sub(other, block)}```" for block in blocks(text))
    assert found == set(sizes)
    return changed


# Bambi's log likelihood is compiled by Numba, which can't keep it in its cache.
@pytest.mark.filterwarnings("ignore:Cannot cache compiled function:numba.core.errors.NumbaWarning")
@pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes are included")
@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: str(path.relative_to(DOCS)))
def test_the_snippets_of_a_page_run(path):
    text = path.read_text(encoding="utf-8")
    if find_spec("jax") is None:
        text = re.sub(r'^```python\n((?!^```).)*backend="jax".*?^```$', "", text, flags=re.MULTILINE | re.DOTALL)
    if "pymc_marketing" in text and path.stem == "marketing":
        pytest.importorskip("pymc_marketing", reason="pymc-marketing is in no dependency group: it holds others back")
    run(smaller(text, SMALLER[name_of(path)]) if name_of(path) in SMALLER else text)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_the_snippets_of_a_page_that_takes_long_run_as_they_stand(name):
    run((DOCS / f"{name}.md").read_text(encoding="utf-8"))
