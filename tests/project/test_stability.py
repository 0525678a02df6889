"""What the page on stability promises, where it can be checked; versions and dates that stand in several places."""

import datetime
import importlib
import re
import tomllib

import pytest

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from texts import API, DOCS, OF_RESULTS, ROOT, documented, read, toctrees

import pymc_ngvi

from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.results.persistence import VERSION
from pymc_ngvi.rows.engines import ENGINES

PAGE = read(DOCS / "stability.md")
PROJECT = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
WORKFLOW = read(ROOT / ".github" / "workflows" / "ci.yml")
VALUES = {**AXES, "posterior": KINDS, "backend": ENGINES}
RELEASES = re.findall(r"^## (\S+) \((.+)\)$", read(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)


def section(heading):
    return re.search(rf"^## {heading}$(.*?)^## ", PAGE, flags=re.MULTILINE | re.DOTALL)[1]


def rows(heading):
    """Return the cells of the table of a section, by the first one of each row."""
    lines = re.findall(r"^\| (.+) \|$", section(heading), flags=re.MULTILINE)
    return {first: cells for first, *cells in (re.split(r" \| ", line) for line in lines)}


PROVISIONAL = rows("What is provisional")
SUPPORTED = rows("Supported versions")


# --- what is named ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", re.findall(r"`([^`]+)`", " ".join(cell for row in PROVISIONAL.values() for cell in row))
)
def test_what_is_provisional_is_there_and_in_the_reference(name):
    """A name that is gone, or is another one now, could not be looked up."""
    owner, _, last = name.rpartition(".")
    option, _, value = name.partition("=")
    if owner == "pymc_ngvi":
        assert any(getattr(pymc_ngvi, last) is one for one in documented())
    elif owner == "approx":
        assert last in OF_RESULTS
    elif value:
        assert value.strip('"') in VALUES[option]
    else:
        assert f"`{name}`" in read(DOCS / "options.md")


def test_pages_that_are_provisional_are_those_of_the_reference():
    named = re.findall(r"\*(.+?)\*", PROVISIONAL["extensions"][0])
    titles = [read(API / f"{page}.md").splitlines()[0].removeprefix("# ") for page in toctrees(API / "index.md")]
    assert named
    assert set(named) <= set(titles)


def test_files_have_the_format_that_is_said():
    assert re.search(r"writes format (\d+)", PAGE)[1] == str(VERSION)


# --- versions ---------------------------------------------------------------------------------------------------------


def specifier(text):
    """Return a range that is told in words."""
    low, high = re.fullmatch(r"([\d.]+) or newer(?:, below ([\d.]+))?", text).groups()
    return SpecifierSet(f">={low}" + f",<{high}" * bool(high))


def test_ranges_are_those_of_the_package():
    required = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    for name in ("PyMC", "PyTensor", "NumPy"):
        assert specifier(SUPPORTED[name][0]) == required[name.lower()], name
    assert specifier(SUPPORTED["Python"][0]) == SpecifierSet(PROJECT["requires-python"])


def test_what_is_tested_is_what_is_promised():
    """Where the first PyMC is installed, the makefile takes the last, and the other way round."""
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    pymcs = re.search(r"([\d., and]+) are tested", read(DOCS / "quickstart.md"))[1].strip().split(" and ")
    for name, promised in (("Python", pythons), ("PyMC", pymcs)):
        assert re.findall(r"\d+\.\d+", SUPPORTED[name][1]) == promised
        matrices = re.findall(rf"{name.lower()}-version: \[(.*)\]", WORKFLOW)
        assert matrices
        assert all(re.findall(r'"(.+?)"', versions) == promised for versions in matrices)
    assert "run: .ci/run" in WORKFLOW
    other = re.search(r"^OTHER_PYMC = (.+)$", read(ROOT / "Makefile"), flags=re.MULTILINE)[1]
    assert sorted(set(re.findall(r'"(\d\.\d+)\.?"', other))) == pymcs
    assert f"pymc>={pymcs[0]},<7" in PROJECT["dependencies"]


def test_the_conda_recipe_asks_for_what_the_package_does():
    """By conda's names: those with `-base` come without a compiler."""
    recipe = read(ROOT / ".github" / "conda" / "recipe.yaml")
    asked = re.search(r"  run:\n    - python .+\n((?:    - .+\n)+)", recipe)[1]
    lines = re.findall(r"- (.+)", re.sub(r"(pymc|pytensor)-base", r"\1", asked))
    assert list(map(Requirement, lines)) == list(map(Requirement, PROJECT["dependencies"]))
    assert f'version: "{pymc_ngvi.__version__}"' in recipe


# --- releases ---------------------------------------------------------------------------------------------------------


def test_dates_of_the_changelog_go_down_and_only_the_first_version_may_have_none():
    dates = [date for _, date in RELEASES]
    assert dates
    assert "unreleased" not in dates[1:]
    released = [datetime.date.fromisoformat(date) for date in dates if date != "unreleased"]
    assert released == sorted(released, reverse=True)


def test_addresses_are_those_of_the_project():
    cited = dict(re.findall(r'^([\w-]+): "?([^"\n]+)', read(ROOT / "CITATION.cff"), flags=re.MULTILINE))
    assert (cited["repository-code"], cited["url"]) == (PROJECT["urls"]["Repository"], PROJECT["urls"]["Documentation"])


# --- the site ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<script src="https://cdn.org/a.js"></script>', "loads https://cdn.org/a.js"),
        ("<img alt='a'\n src='//cdn.org/a.png'>", "loads //cdn.org/a.png"),
        ('<link rel="stylesheet" href="https://fonts.org/css">', "loads https://fonts.org/css"),
        ("<style>@import url(https://fonts.org/css);</style>", "loads https://fonts.org/css"),
        (f"<pre>{ROOT}/docs</pre>", "of this machine"),
        ('<a href="https://doi.org/10.1">10.1</a><link rel="canonical" href="https://a.org/"><img src="a.png">', ""),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(monkeypatch, tmp_path, text, said):
    monkeypatch.syspath_prepend(ROOT / "tests" / "packaging")
    site = importlib.import_module("site_check")
    (tmp_path / "index.html").write_text(text)
    found = site.faults(tmp_path)
    assert len(found) == bool(said)
    assert all(said in one for one in found)
