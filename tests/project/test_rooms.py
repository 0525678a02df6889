"""The layout of the package: imports run downwards and in no circle; PyTensor has its place."""

import ast
import graphlib
import re
import subprocess
import sys

from collections import Counter
from pathlib import Path

import pytest
import texts

import pymc_ngvi

from pymc_ngvi.families import FAMILIES
from pymc_ngvi.methods import MIXTURE_STEPS, STEPS, UPDATES
from pymc_ngvi.methods.estimators import ESTIMATORS
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.rows.engines import ENGINES

ROOT = Path(pymc_ngvi.__file__).parent
#: Rooms from the cellar to the roof: a module imports from its own and from those before it.
FLOORS = (
    "core", "families", "rows", "graphs", "ops", "reading", "rows.engines", "density", "methods",
    "marginal", "nested", "moves", "posteriors.plan", "fitting", "posteriors",
    "results.structure",
    "results.distributions", "results.diagnosis", "results.predictions", "results.reweighted",
    "results.sampling", "results.left_out",
    "results.plotting", "results.summary",
    "results.persistence", "results.group", "results.approximation",
    "results.choice", "results", "inference", "many", "register", "",
)  # fmt: skip


#: Rooms, and modules, that import PyTensor.
WITH_PYTENSOR = ("graphs", "ops", "reading", "rows.engines", "density", "results.group", "results.approximation")


#: Modules that nothing imports before it needs them.
LARGE = (
    "scipy.stats", "scipy.optimize", "scipy.interpolate", "scipy.spatial", "scipy.integrate", "scipy.ndimage", "numba",
    "arviz", "arviz_plots", "arviz_stats", "matplotlib", "pymc_extras", "bambi", "dask", "jax",
)  # fmt: skip


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(path):
    """Return the full names that a module imports, wherever in it: lazily, and for type checkers, too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def arrows():
    """Return which modules of the package each of them imports."""
    graph = {}
    for name, path in MODULES.items():
        graph[name] = set()
        for full in imports_of(path):
            if full.split(".")[0] == "pymc_ngvi":
                inner = full.partition(".")[2]
                while inner not in MODULES:
                    inner = inner.rpartition(".")[0]
                graph[name] |= {inner} - {name}
    return graph


def floor_of(module):
    inside = [floor for floor in FLOORS if module == floor or module.startswith(f"{floor}.")]
    return FLOORS.index(max(inside, key=len))


def test_nothing_is_imported_in_a_circle():
    list(graphlib.TopologicalSorter(arrows()).static_order())  # CycleError names the modules


def test_imports_run_downwards():
    up = [f"{a} imports {b}" for a, found in arrows().items() for b in found if floor_of(b) > floor_of(a)]
    assert up == []


def bound_in(tree):
    """Return the names that statements at the top of a module bind."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            named = (n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))
            yield from (n.id for n in named if isinstance(n.ctx, ast.Store))
        elif isinstance(node, ast.TypeAlias):
            yield node.name.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


@pytest.mark.parametrize("name", MODULES)
def test_no_name_is_bound_twice(name):
    names = Counter(bound_in(ast.parse(MODULES[name].read_text(encoding="utf-8"))))
    assert [n for n, times in names.items() if times > 1 and n != "_"] == []  # the second would be that of both


def test_the_top_level_has_few_modules():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == ["__init__", "inference", "many", "register"]


def test_rooms_that_import_pytensor():
    found = {name for name, path in MODULES.items() if any(n.split(".")[0] == "pytensor" for n in imports_of(path))}
    rooms = {room for room in WITH_PYTENSOR for name in found if name == room or name.startswith(f"{room}.")}
    assert rooms == set(WITH_PYTENSOR)
    assert [
        name for name in found if not name.startswith(tuple(f"{room}." for room in rooms)) and name not in rooms
    ] == []


def test_large_modules_are_imported_where_they_are_used():
    """They take longer to import than all of the package, and most fits need none of them."""
    lines = ["import sys, pymc", "before = {*sys.modules}", "import pymc_ngvi", "print(*{*sys.modules} - before)"]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "pymc_ngvi.inference" in run.stdout.split()
    assert {name for name in LARGE if name in run.stdout.split()} == set()


def test_private_names_of_pymc_and_pytensor_are_imported_in_one_module():
    private = {
        module
        for module, path in MODULES.items()
        for name in imports_of(path)
        if name.startswith(("pymc.", "pytensor.")) and "._" in name
    }
    assert private == {"graphs.private"}


def test_numbers_by_rows_need_no_pytensor():
    """Nothing in `rows`, its engines apart, imports a module that imports PyTensor, through others neither."""
    graph = arrows()
    todo = {name for name in MODULES if name.startswith("rows") and not name.startswith("rows.engines")}
    reached = set()
    while todo:
        reached |= todo
        todo = {inner for name in todo for inner in graph[name] if inner} - reached
    assert {name.split(".")[0] for name in reached} == {"rows", "core"}


# --- CONTRIBUTING.md tells of all of them ----------------------------------------------------------------------------

CONTRIBUTING = texts.read(texts.ROOT / "CONTRIBUTING.md")
REGISTRIES = {
    "families": FAMILIES,
    "updates": UPDATES,
    "estimators": ESTIMATORS,
    "steps": STEPS,
    "steps that families imply": MIXTURE_STEPS,
    "engines": ENGINES,
    "posteriors": KINDS,
}


def test_every_folder_is_told_of():
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in MODULES.values()} - {"./"}
    told = set(re.findall(r"`([a-z_/]+/)`", CONTRIBUTING))
    assert folders - told == set()
    elsewhere = ("tests/", "docs/", "examples/", "pymc_ngvi/")
    assert {name for name in told - folders if not name.startswith(elsewhere)} == set()


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_entry_is_told_of(name):
    rows = [
        re.findall(r"`([a-z_]+)`", line.split("|")[-2]) for line in CONTRIBUTING.splitlines() if line.startswith("|")
    ]
    assert list(REGISTRIES[name]) in rows
