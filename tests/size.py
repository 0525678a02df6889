"""Count what the package and its tests consist of: python tests/size.py [FOLDER].

Statements are those of the syntax tree without docstrings, so that shorter docstrings, longer lines and files that are
joined change nothing. Numbers are all literals beside -1, 0, 1, 2 and 0.5.
"""

import ast
import sys

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Numbers that say no more than a name would; a minus sign is an operator of its own.
PLAIN = (0, 1, 2, 0.5)


def count(text):
    """Return the number of statements, numbers, classes and functions of one statement in a source."""
    sizes = Counter()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.Constant(value=bool()):
                continue
            case ast.Constant(value=int() | float() as value):
                sizes["numbers"] += value not in PLAIN
            case ast.ClassDef():
                sizes["classes"] += 1
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                sizes["functions of one statement"] += len(node.body) - bool(ast.get_docstring(node)) == 1
        sizes["statements"] += isinstance(node, ast.stmt)
    return sizes


def sizes_of_rooms(folder):
    """Return the counts of each folder directly below one, with "" for the files that lie in it."""
    rooms = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "", Counter())
        room.update(count(path.read_text(encoding="utf-8")))
    return rooms


def total(rooms):
    """Return the counts of all rooms together."""
    return sum(rooms.values(), Counter())


def main(folder="pymc_ngvi"):
    """Print a line for each room, and one for all."""
    rooms = sizes_of_rooms(ROOT / folder)
    kinds = list(total(rooms))
    print(f"{'':20}" + "".join(f"{kind:>28}" for kind in kinds))
    for name, sizes in [*sorted(rooms.items(), key=lambda row: -row[1]["statements"]), ("all", total(rooms))]:
        print(f"{name or '(top level)':20}" + "".join(f"{sizes[kind]:28,}" for kind in kinds))


if __name__ == "__main__":
    main(*sys.argv[1:])
