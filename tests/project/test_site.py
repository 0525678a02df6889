"""The site has all pages and all public names, and what it shows is what happens; `make docs` builds it."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re

from pathlib import Path

import pytest

from texts import OF_RESULTS, documented, public, read, toctrees

import pymc_ngvi

from pymc_ngvi import NGVIApproximation
from pymc_ngvi.fitting.options import AXES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Folders that the build makes, a part of the front page, and what is none of the site.
MADE = ("_build", "_static", "examples", "my_model.md", "paper")
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in MADE
}


# --- pages ------------------------------------------------------------------------------------------------------------


def children(name):
    """Return the pages that the toctrees of a page name, without those of patterns, and those of patterns."""
    folder = (DOCS / name).parent
    entries = [(folder / entry).relative_to(DOCS).as_posix() for entry in toctrees(PAGES[name])]
    named = [entry for entry in entries if "*" not in entry]
    patterns = [entry for entry in entries if "*" in entry]
    # A star of Sphinx does not match a slash.
    expressions = [re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns]
    return named, [page for page in PAGES if page not in named if any(re.fullmatch(e, page) for e in expressions)]


def test_every_page_is_reached_once():
    """What is in no toctree is not in the menu; Sphinx counts that, and a page in two of them, as an error."""
    reached, todo = [], ["index"]
    while todo:
        name = todo.pop()
        reached.append(name)
        named, matched = children(name)
        todo += named + matched
    assert sorted(reached) == sorted(PAGES)


@pytest.mark.parametrize(("kind", "selector"), [("python", "div.highlight pre"), ("text", "div.highlight-text pre")])
def test_lines_fit_the_column(kind, selector):
    """The style sheet makes letters so small that lines of a length fit: there are no longer ones."""
    style = read(DOCS / "_static" / "site.css")
    sized = rf"^\.bd-article {re.escape(selector)}[^{{}}]*{{[^}}]*100cqi / ([\d.]+)"
    width = (float(re.search(sized, style, flags=re.MULTILINE)[1]) - 2.0) / 0.602
    prose = {"citing"}  # wraps
    for name in PAGES.keys() - prose:
        found = re.findall(rf"^```{kind}\n(.*?)^```$", read(PAGES[name]), flags=re.MULTILINE | re.DOTALL)
        longest = max((line for block in found for line in block.splitlines()), key=len, default="")
        assert len(longest) <= width + 0.5, (name, longest)


# --- reference --------------------------------------------------------------------------------------------------------


MODULES = ["pymc_ngvi", "conditional_family", "pymc_ngvi.core.types"] + [
    found.name for found in pkgutil.walk_packages(pymc_ngvi.__path__, "pymc_ngvi.") if found.ispkg
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    there = {*map(id, documented()), *map(id, NGVIApproximation.__mro__)}  # its methods are listed one by one
    missing = [name for name, value in public(importlib.import_module(module)).items() if id(value) not in there]
    assert missing == []


@pytest.mark.parametrize("axis", AXES)
def test_what_every_word_stands_for_is_in_the_reference(axis):
    there = set(map(id, documented()))
    assert [name for name, value in AXES[axis].items() if id(value) not in there] == []


def test_everything_that_a_result_has_is_in_the_reference_once():
    own = [part for part in NGVIApproximation.__mro__ if part.__module__.startswith("pymc_ngvi")]
    names = {name for part in own for name in vars(part) if not name.startswith("_")}
    assert sorted(OF_RESULTS) == sorted(names)


# --- what is refused --------------------------------------------------------------------------------------------------

CASES = doctest.DocTestParser().get_examples(read(DOCS / "bad_input.md").replace("```", "\n"))


# PyMC warns of a missing total_size, before it is refused.
@pytest.mark.filterwarnings("ignore:total_size not provided")
def test_bad_input_is_refused_as_the_page_says():
    """In the same words, wherever the page breaks its lines."""
    scope = {"__name__": "__main__"}
    said, raised = [], []
    for case in CASES:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(compile(case.source, "bad_input.md", "exec"), scope)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
            else:
                raised.append("")
        said.append(case.want)
    assert [message.split() for message in raised] == [message.split() for message in said]
    assert sum(map(bool, said)) > 30


# --- beside the site --------------------------------------------------------------------------------------------------


def test_versions_agree():
    version = pymc_ngvi.__version__
    assert re.search(r"^version: (.+)$", read(ROOT / "CITATION.cff"), flags=re.MULTILINE)[1] == version
    assert re.search(r"^## ([\d.]+)", read(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)[1] == version
    assert f"Version {version}." in read(PAGES["citing"])
    assert re.search(r'^version = "(.+)"$', read(ROOT / "pyproject.toml"), flags=re.MULTILINE)[1] == version


def test_commands_are_targets():
    makefile = read(ROOT / "Makefile")
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)[1].split())
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", PAGES["benchmarks"]]
    for path in texts:
        named = set(re.findall(r"(?:^|`)make ([a-z]+(?:-[a-z]+)*)", read(path), flags=re.MULTILINE))
        assert named <= targets, path
    groups = set(
        re.findall(r"^(\w+) = \[", read(ROOT / "pyproject.toml").split("[dependency-groups]")[1], re.MULTILINE)
    )
    assert set(re.findall(r"\$\(STAMP\)(\w+)", makefile)) <= groups
