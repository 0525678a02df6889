"""Tests in `tests/public/` use what a user has: the names that `pymc_ngvi` itself has, and no private attribute."""

import ast
import functools
import re

import pytest

from texts import ROOT

import pymc_ngvi

TESTS = ROOT / "tests"
PUBLIC = sorted((TESTS / "public").glob("*.py"))
#: Files of tests that use more, at most; goes down until they are the smaller part.
INSIDE = 128


@functools.cache
def inside(path):
    """Return what a file, or a module of `tests/` that it imports, uses of the inside of the package."""
    tree, names, used = ast.parse(path.read_text(encoding="utf-8")), set(), []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases]
                names |= {alias.asname or alias.name for alias in aliases if alias.name == "pymc_ngvi"}
                used += [module for module in modules if module.startswith("pymc_ngvi.")]
            case ast.ImportFrom(module=module, names=aliases):
                modules = [module]
                if module.split(".")[0] == "pymc_ngvi":
                    whole = pymc_ngvi.__all__ if module == "pymc_ngvi" else ()
                    used += [f"{module}.{alias.name}" for alias in aliases if alias.name not in whole]
            case ast.Constant(value=str(text)) if re.match(r"pymc_ngvi\.\w", text):  # of a patch, or of import_module
                used.append(text)
                continue
            case _:
                continue
        for module in modules:
            beside = TESTS / f"{module}.py"
            used += inside(beside) if beside.exists() else []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in names and attr != "__version__":
                used += [] if attr in pymc_ngvi.__all__ else [f"{name}.{attr}"]
            case ast.Attribute(value=value, attr=attr) if re.match(r"_[a-z]", attr):
                used += [] if isinstance(value, ast.Name) and value.id == "self" else [attr]
    return used


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
        "import pymc_ngvi as ng\nng.density",
        "patch('pymc_ngvi.density.flat')",
        "approx._state",
        "from matrix import PAIRS",
        "import targets",
    ],
)
def test_use_of_the_inside_is_noticed(line, tmp_path):
    (tmp_path / "it.py").write_text(line)
    assert inside(tmp_path / "it.py")
