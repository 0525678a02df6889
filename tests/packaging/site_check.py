"""Look at a site that was built: nothing of it is loaded from elsewhere, and nothing tells where it was built.

``make docs`` runs it: ``python tests/packaging/site_check.py docs/_build/html``. Pages open without a network then.
"""

import re
import sys

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a page loads: of a link, only a stylesheet, an icon or what is loaded ahead, not where it points.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?
        \b(?:src|srcset|data|href|poster)\s*=\s*["']((?:https?:)?//[^"']+)""",
    flags=re.VERBOSE | re.IGNORECASE,
)
#: What a stylesheet loads.
IMPORTED = re.compile(r"""(?:@import\s*["']|url\(\s*["']?)((?:https?:)?//[^"')\s]+)""", flags=re.IGNORECASE)
#: Where it may have been built.
MACHINE = re.compile("|".join(re.escape(f"{path}/") for path in {ROOT, Path.home()} if path != Path("/")) + "|file://")
#: A canonical link or one to another format is not loaded.
POINTS = re.compile(r"""\brel\s*=\s*["'](?:canonical|alternate|author|license|next|prev|search|index)["']""")


def from_elsewhere(text: str, expression: re.Pattern[str]) -> list[str]:
    """Return the addresses that a text loads."""
    return [found[1] for found in expression.finditer(text) if not POINTS.search(found[0])]


def faults(site: Path) -> list[str]:
    """Return what is wrong with a site, in sentences."""
    said = []
    for path in sorted(site.rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        text, name = path.read_text(encoding="utf-8"), path.relative_to(site)
        expressions = (LOADED, IMPORTED) if path.suffix == ".html" else (IMPORTED,)
        loaded = [address for expression in expressions for address in from_elsewhere(text, expression)]
        said += [f"{name} loads {address}" for address in loaded]
        said += [f"{name} has the path {found[0]!r} of this machine" for found in MACHINE.finditer(text)]
    return said


def main() -> None:
    """Check a site."""
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        raise SystemExit(f"{site} has no index.html.")
    if said := faults(site):
        raise SystemExit("\n".join(said))


if __name__ == "__main__":
    main()
