"""A family is one file and one row: its name decides nothing anywhere else."""

import ast
import re

from pathlib import Path

import pytest

import pymc_ngvi

from pymc_ngvi.families import COMPONENTS, FAMILIES, FullPrecisionState, FullState, Traits, name_of, traits_of
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.registry import RULES

ROOT = Path(pymc_ngvi.__file__).parent
#: Words for other things: the mass matrix of a sampler, and blocks that are counted.
OTHER_MEANINGS = {("results/samplers.py", "diagonal"), ("results/structure.py", "block")}


def strings(path):
    """Yield the string constants of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented)
                  and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def elsewhere():
    """Yield path and string of all modules outside `pymc_ngvi.families`; the names of old files are what they were."""
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith("families/") and where != "results/persistence/format_1.py":
            yield from ((where, text) for text in strings(path))


def test_no_other_module_knows_the_name_of_a_family_or_of_its_rule():
    own = {family.traits.own_rule for family in FAMILIES.values()} - {""}
    found = {(where, text) for where, text in elsewhere() if text in FAMILIES or text in own}
    of_rules = {(where, text) for where, text in found if text in own}
    assert found - of_rules == OTHER_MEANINGS
    assert {where for where, _ in of_rules} == {"mixtures/__init__.py"}  # the row of each


def test_families_that_messages_advise_exist():
    advised = {name for _, text in elsewhere() for name in re.findall(r"family='(\w+)'", text)}
    assert advised
    assert advised <= set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_says_what_the_package_asks(name):
    traits = FAMILIES[name].traits
    assert traits.name == name
    assert traits.goes_with
    assert traits.states
    assert all(hasattr(state, "from_params") for state in traits.states)
    assert set(traits.factors) <= {"covariance", "precision"}
    assert set(traits.options) <= {field for field in vars(FitOptions())}
    assert not traits.own_rule or traits.own_rule in RULES
    assert traits_of(name) is traits


def test_the_family_of_a_state():
    assert {name_of(object.__new__(state)) for f in FAMILIES.values() for state in f.traits.states} == set(FAMILIES)
    assert name_of(object.__new__(FullPrecisionState)) == name_of(object.__new__(FullState)) == "full"
    assert name_of(object()) == "object"
    assert traits_of("object") == Traits(name="object")


def test_components_are_families():
    assert all(FAMILIES[name] is family for name, family in COMPONENTS.items())
