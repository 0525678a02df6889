"""The texts of the repository: pages, their sections, tables, blocks of code, and what is in the reference."""

import contextlib
import importlib
import io
import re

from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def section(path, heading):
    """Return what stands under a heading of the second level."""
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def rows(text):
    """Return the cells of the rows of the tables in a text, without the heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [i for i, row in enumerate(cells) if all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


def words(text):
    """Return what is set in a fixed width."""
    return re.findall(r"`([^`]+)`", text)


def blocks(text):
    """Return the Python blocks of a text."""
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(text):
    """Run the blocks of a text one after the other; a comment beside ``print`` says what that prints."""
    code = blocks(text)
    assert code
    scope = {"__name__": "__main__"}
    for block in code:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, "example", "exec"), scope)
        lines = iter(printed.getvalue().splitlines())
        expected = re.findall(r"^print\(.*\)  # (.+)$", block, flags=re.MULTILINE)
        assert [line for line in expected if line not in lines] == []


def anchor(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


API = DOCS / "api"


def read(path):
    return path.read_text(encoding="utf-8")


#: The methods and properties of results that directives of the reference name.
OF_RESULTS = re.findall(r"^\.\. auto.*:: NGVIApproximation\.(\w+)$", "".join(map(read, API.glob("*.md"))), flags=re.M)


def toctrees(page):
    """Return the entries of the toctrees of a page, as it writes them."""
    found = re.findall(r"^```\{toctree\}\n(.*?)^```$", read(page), flags=re.MULTILINE | re.DOTALL)
    lines = [line for toctree in found for line in toctree.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def public(module):
    """Return the public objects of a module by name."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def documented():
    """Return the objects that the directives of the reference name."""
    found = []
    for page in API.glob("*.md"):
        module = None
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)$", read(page), flags=re.MULTILINE):
            if kind == "currentmodule":
                module = importlib.import_module(name)
            elif kind == "automodule":
                found += public(importlib.import_module(name)).values()
            elif kind.startswith("auto") and kind != "autosummary":
                found.append(attrgetter(name)(module))
    return found
