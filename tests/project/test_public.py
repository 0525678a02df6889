"""Tests in `tests/public/` use what a user has: the names that `pymc_ngvi` itself has, and no private attribute."""

import functools
import re

import pytest

from texts import ROOT

import pymc_ngvi

TESTS = ROOT / "tests"
PUBLIC = sorted((TESTS / "public").glob("*.py"))
#: Files of tests that use more, at most; goes down until they are the smaller part.
INSIDE = 128


#: Names that are imported from the package; what is named below it, in strings too; private attributes of others.
IMPORTED = re.compile(r"^from pymc_ngvi import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
BELOW, PRIVATE = re.compile(r"\bpymc_ngvi\.(\w+)"), re.compile(r"(?<!\bself)\._[a-z]\w*")


@functools.cache
def inside(path):
    """Return what a file, or a module of `tests/` that it imports, uses of the inside of the package."""
    text = path.read_text(encoding="utf-8")
    names = re.findall(r"\w+", " ".join("".join(names) for names in IMPORTED.findall(text))) + BELOW.findall(text)
    beside = [TESTS / f"{module}.py" for module in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)]
    used = [name for name in names if name not in (*pymc_ngvi.__all__, "__version__")] + PRIVATE.findall(text)
    return used + [name for other in beside if other.exists() for name in inside(other)]


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_public_tests_use_what_a_user_has(path):
    assert inside(path) == []


def test_fewer_files_use_the_inside():
    files = [path for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] != "benchmarks"]
    using = [path for path in files if inside(path)]
    assert len(using) <= INSIDE, f"{len(using)} of {len(files)} files of tests use the inside of the package"


@pytest.mark.parametrize(
    "line",
    [
        "import pymc_ngvi.density",
        "from pymc_ngvi.density import Layout",
        "from pymc_ngvi import density",
        "patch('pymc_ngvi.density.flat')",
        "approx._state",
        "from matrix import PAIRS",
        "import targets",
    ],
)
def test_use_of_the_inside_is_noticed(line, tmp_path):
    (tmp_path / "it.py").write_text(line)
    assert inside(tmp_path / "it.py")
