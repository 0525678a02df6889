"""Every snippet of the documentation runs, and prints what the comment beside it says."""

import pytest

from test_docs import DOCS, blocks, run

#: Pages that are run with the tests of what they are about, and the catalogue of errors.
RUN_ELSEWHERE = {"bad_input", "corrections", "diagnostics", "extending", "plots", "samplers", "saving"}
TO_RUN = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).with_suffix("").as_posix() not in RUN_ELSEWHERE
    and blocks(path.read_text(encoding="utf-8"))
]


@pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes are included")
@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: str(path.relative_to(DOCS)))
def test_the_snippets_of_a_page_run(path):
    text = path.read_text(encoding="utf-8")
    if 'backend="jax"' in "".join(blocks(text)):
        pytest.importorskip("jax", reason="JAX is not installed")
    if "pymc_marketing" in text and path.stem == "marketing":
        pytest.importorskip("pymc_marketing", reason="pymc-marketing is in no dependency group: it holds others back")
    run(text)
