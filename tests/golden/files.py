"""The record in the tree: a file for each part, a line for each case."""

import json

from pathlib import Path

from golden import cases, compare, measured

FOLDER = Path(__file__).parent / "record"


#: What is recorded: kinds of rows and patterns; fits.
PARTS = {
    "structure": (lambda name: measured.structure_of(cases.density_of(name)), compare.structures_differ),
    "fits": (lambda name: cases.FITS[name](), compare.fits_differ),
}


def measure(part, name):
    """Return what is measured of a case, as it would be read from a file."""
    return json.loads(json.dumps(PARTS[part][0](name)))


def differ(part, old, new):
    """Return how it differs from what was recorded, in sentences."""
    return PARTS[part][1](old, new)


def read(part):
    """Return the record of a part."""
    file = FOLDER / f"{part}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(part, record):
    """Write it."""
    FOLDER.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(record.items())]
    (FOLDER / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
