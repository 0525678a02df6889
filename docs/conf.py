"""Configuration of Sphinx: ``make docs`` builds the site into ``docs/_build/html``, offline, running no code."""

import logging
import re
import shutil
import sys
import tomllib

from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref
from sphinx.util.logging import getLogger

import pymc_ngvi

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # one example has a page of the reference

project = "pymc_ngvi"
author = "The pymc_ngvi developers"
project_copyright = author
version = release = pymc_ngvi.__version__

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]
# The table of models is part of the front page; the paper is none of the site.
exclude_patterns = ["_build", "**.ipynb_checkpoints", "my_model.md", "paper"]
# Pages that scripts write have their headings from there.
suppress_warnings = ["myst.header"]

# --- pages ---

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# What is shown of a notebook is what it holds.
nb_execution_mode = "off"

# --- reference ---

# A name in single backquotes is a link if there is such an object, and else in a fixed width.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = False
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# --- look ---

html_theme = "sphinx_book_theme"
html_title = "pymc_ngvi"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options: dict[str, Any] = {
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
}
# MathML, which browsers show by themselves: no script, no fonts, nothing to fetch.
html_math_renderer = "mathml"
# A button copies the code, without the prompts and what is printed.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight-python pre, div.highlight-default pre, div.highlight-console pre, div.cell pre"


def repository() -> str:
    """Return the address of the repository that pyproject.toml names; empty where it names none."""
    text = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    urls = tomllib.loads(text)["project"].get("urls", {})
    return next((url for name, url in urls.items() if name.lower() in ("repository", "source", "source code")), "")


if repository():
    html_theme_options |= {"repository_url": repository(), "use_repository_button": True}


#: Markup that is meant, and a bar or a star that is none: |x|, (..., *shape).
_MARKUP = re.compile(r"(``.+?``|`.+?`|\*\*\S.*?\*\*|(?<!\w)\*\w[^*]*\*(?!\w)|\\.)|(\||\*(?=\w))")


def escape_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape the bars and stars of formulas in docstrings, which are plain text; examples and LaTeX stay."""
    literal = math = False
    for i, line in enumerate(lines):
        literal = bool(line) and (literal or line.startswith(">>>"))
        math = line.startswith(".. math::") or (math and (not line or line.startswith(" ")))
        if not literal and not math and ":math:" not in line:
            lines[i] = _MARKUP.sub(lambda match: match[1] or "\\" + match[2], line)


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples as members: they are parameters already."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def relabel_citations(app: Any, doctree: nodes.document) -> None:
    """Show [1] for the label that numpydoc makes of it, which it does itself only outside Markdown."""
    for reference in doctree.findall(pending_xref):
        number = re.fullmatch(r"R[0-9a-f]{12}-(\w+)", reference.get("reftarget", ""))
        if number:
            reference.children = []
            reference += nodes.inline("", f"[{number[1]}]")


def copy_notebooks(app: Any) -> None:
    """Copy the notebooks, which hold their outputs, beside the pages: Sphinx reads no file outside its folder."""
    target = DOCS / "examples"
    shutil.rmtree(target, ignore_errors=True)
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        target.mkdir(exist_ok=True)
        shutil.copyfile(notebook, target / notebook.name)


def mathml(writer: Any, node: Any, display: str) -> str:
    """Return a formula as MathML; a command that is not known is a warning."""
    made: str = convert(re.sub(r"\\arg\b", r"\\operatorname{arg}", node.astext()), display=display)
    if "\\" in made.split("<annotation")[0]:
        getLogger(__name__).warning("A formula has a command that MathML output does not know: %s", node.astext())
    return made


def visit_math(writer: Any, node: Any) -> None:
    """Write a formula within a line."""
    writer.body.append(mathml(writer, node, "inline"))
    raise nodes.SkipNode


def visit_displaymath(writer: Any, node: Any) -> None:
    """Write a formula of its own, which scrolls where it is wider than the page."""
    writer.body.append(f'<div class="formula">{mathml(writer, node, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect the functions above."""
    # Sphinx gives this warning no type, so that `suppress_warnings` can't name it: a folder may have no page yet.
    logger = logging.getLogger("sphinx.sphinx.directives.other")
    logger.addFilter(lambda record: getattr(record, "subtype", "") != "empty_glob")
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    app.connect("builder-inited", copy_notebooks)
    app.connect("autodoc-process-docstring", escape_formulas, priority=900)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("doctree-read", relabel_citations, priority=900)
