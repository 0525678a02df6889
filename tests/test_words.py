"""One word has one meaning: classes, and functions that others import by name, have names of their own."""

import ast
import collections

import pytest

from test_rooms import MODULES


@pytest.fixture(scope="module")
def trees():
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def repeated(names):
    """Return the names that are there more than once, each with where it is."""
    places = collections.defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_is_there_twice(trees):
    nodes = [(node, name) for name, tree in trees.items() for node in ast.walk(tree)]
    classes = [(node.name, name) for node, name in nodes if isinstance(node, ast.ClassDef)]
    assert len(classes) > 500
    assert repeated(classes) == {}


def test_no_two_functions_are_imported_by_the_same_name(trees):
    """Modules imported whole, as `linalg` and `stacks` are, say so; entries of registries are words of users."""
    imports = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    by_name = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    nodes = [(node, name) for name, tree in trees.items() for node in tree.body]
    functions = [(node.name, name) for node, name in nodes if isinstance(node, ast.FunctionDef)]
    functions = [(function, name) for function, name in functions if not name.endswith(f".{function}")]
    imported = [(function, name) for function, name in functions if f"pymc_ngvi.{name}.{function}" in by_name]
    assert len(imported) > 300
    assert repeated(imported) == {}
