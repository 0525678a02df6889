"""CONTRIBUTING.md tells of all folders and registries of the package."""

import re

from pathlib import Path

import pytest

from test_rooms import MODULES, ROOT

from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.mixtures import MIXTURE_STEPS
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.rows.engines import ENGINES
from pymc_ngvi.steps import STEPS
from pymc_ngvi.updates import UPDATES

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


REGISTRIES = {
    "families": FAMILIES,
    "updates": UPDATES,
    "estimators": ESTIMATORS,
    "steps": STEPS,
    "mixtures": MIXTURE_STEPS,
    "engines": ENGINES,
    "posteriors": KINDS,
}


def test_every_folder_is_told_of():
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in MODULES.values()} - {"./"}
    told = set(re.findall(r"`([a-z_/]+/)`", TEXT))
    assert folders - told == set()
    elsewhere = ("tests/", "docs/", "examples/", "pymc_ngvi/")
    assert {name for name in told - folders if not name.startswith(elsewhere)} == set()


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_entry_is_told_of(name):
    rows = [re.findall(r"`([a-z_]+)`", line.split("|")[-2]) for line in TEXT.splitlines() if line.startswith("|")]
    assert list(REGISTRIES[name]) in rows
