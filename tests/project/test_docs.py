"""The facts of the documentation: each entry, option and public name is there, links resolve, snippets run."""

import inspect
import itertools
import re

import pytest

from texts import DOCS, ROOT, anchor, blocks, rows, section, words

from pymc_ngvi import NGVI, NGVIApproximation, fit_many
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.fitting.options import ALLOWED, AUTO, AXES, RULES, choose

PAGES = {"family": "families.md", "update": "updates.md", "estimator": "estimators.md", "step": "steps.md"}
ENTRIES = [(axis, name) for axis in AXES for name in AXES[axis]]
#: The family that implies a rule, by the rule.
BY_RULE = {family.traits.own_rule: name for name, family in FAMILIES.items() if family.traits.own_rule}
OPTIONS = {*inspect.signature(NGVI.__init__).parameters, *inspect.signature(NGVI.fit).parameters} - {"unknown"}
OF_METHODS = {
    parameter
    for name, method in inspect.getmembers(NGVIApproximation, inspect.isfunction)
    if not name.startswith("_")
    for parameter in inspect.signature(method).parameters
} | set(inspect.signature(fit_many).parameters)

each_entry = pytest.mark.parametrize(("axis", "name"), ENTRIES, ids=lambda value: value)


# --- pages ------------------------------------------------------------------------------------------------------------


def of_entry(axis, name):
    return section(DOCS / PAGES[axis], f"`{name}`")


@pytest.mark.parametrize("axis", AXES)
def test_a_page_has_one_section_for_each_entry_and_begins_with_all_of_them(axis):
    before, *found = re.split(r"^## `(\w+)`$", (DOCS / PAGES[axis]).read_text(encoding="utf-8"), flags=re.M)
    assert set(re.findall(r"\| \[`(\w+)`\]\(#\1\)", before)) == set(found[::2]) == set(AXES[axis])


@each_entry
def test_a_section_says_what_goes_with_its_entry(axis, name):
    (said,) = re.findall(r"^\*\*Goes with\*\* (.+?)\.\s", of_entry(axis, name), re.M | re.S)
    listed = dict(part.split(":", 1) for part in re.split(r";\s", said))
    at = list(AXES).index(axis)
    for i, other in enumerate(AXES):
        if other != axis:
            expected = {row[i] for row in ALLOWED if row[at] == name} & set(AXES[other])
            assert set(words(listed.pop(other))) == expected, other
    assert not listed


def test_tables_list_the_options_that_step_rules_take():
    """Of all rules in one table, with dashes for what is refused; of those that a family implies, in its section."""
    table = section(DOCS / PAGES["step"], "Options")
    options = words(table.split("| rule", 1)[1].split("\n", 1)[0])
    listed = {
        words(rule)[0]: {options[i] for i, cell in enumerate(cells) if cell != "-"} for rule, *cells in rows(table)
    }
    for rule, family in BY_RULE.items():
        listed[rule] = {words(row[0])[0] for row in rows(of_entry("family", family)) if words(row[0])} - {"components"}
    assert listed == {rule: set(kind.takes) for rule, kind in RULES.items()}


@each_entry
def test_the_example_of_a_section_is_of_its_entry(axis, name):
    assert any(f'{axis}="{name}"' in block for block in blocks(of_entry(axis, name)))


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_the_table_of_what_goes_with_what_is_the_registry():
    listed = []
    for update, estimators, families, steps in rows(section(DOCS / "choosing.md", "What goes with what")):
        own = [FAMILIES[family].traits.own_rule for family in words(families)]
        listed += itertools.product(words(families), words(update), words(estimators), words(steps) or own)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ALLOWED)


def test_what_is_chosen_for_one_word():
    listed = {}
    for given, *chosen in rows(section(DOCS / "choosing.md", "What is chosen")):
        axis, name = re.fullmatch(r'`(\w+)="(\w+)"`', given).groups()
        listed[axis, name] = tuple(word for cell in chosen for word in words(cell))
    usual = choose().given()
    chosen = {(axis, name): choose(**{axis: name}).given() for axis, name in ENTRIES}
    assert listed == {key: tuple(of.values()) for key, of in chosen.items() if {**of, key[0]: usual[key[0]]} != usual}


def test_the_options_of_single_methods_go_with_what_the_page_says():
    listed = {words(row[0])[0]: row[1] for row in rows(section(DOCS / "options.md", "Of single methods"))}
    assert set(listed) <= OPTIONS
    for name, rule_names in listed.items():
        takes = {BY_RULE.get(rule, rule) for rule, kind in RULES.items() if name in kind.takes}
        if takes:
            named = set(words(rule_names))
            assert named == ({*AXES["step"], *BY_RULE.values()} - takes if rule_names.startswith("all") else takes), (
                name
            )
    of_rules = set().union(*(kind.takes for kind in RULES.values()))
    assert of_rules | {"stl", "factor", "blocks", "components"} == set(listed)


# --- methods, options, readme -----------------------------------------------------------------------------------------


def test_calls_of_papers_name_every_method_that_is_of_a_paper_and_no_other():
    calls = "".join(cell for row in rows((DOCS / "papers.md").read_text(encoding="utf-8")) for cell in row)
    listed = re.findall(r'(\w+)="(\w+)"', calls)
    ours = {("family", "full"), ("family", "block"), ("step", "adaptive")}
    assert set(ENTRIES) - set(listed) <= ours
    assert all(name in AXES.get(axis, [name]) for axis, name in listed)


def test_the_page_of_options_lists_every_one():
    listed = [name for row in rows((DOCS / "options.md").read_text(encoding="utf-8")) for name in words(row[0])]
    assert set(listed) == OPTIONS - {"self", "model", "progressbar_theme"}


def test_the_examples_of_the_readme_run_as_pasted():
    """That by Bambi goes on from that by PyMC."""
    scope = {"__name__": "__main__"}
    for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        exec(compile(block, "README.md", "exec"), scope)
        assert scope["approx"].is_exact
    assert set(scope["posterior"].posterior.data_vars) >= {"intercept", "slope", "sd", "effect"}


# --- all --------------------------------------------------------------------------------------------------------------

TEXTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize(
    "path",
    [*TEXTS, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "tests" / "benchmarks" / "results").glob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_point_to_files_and_headings_that_exist(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, heading = link.partition("#")
        where = (path.parent / file).resolve() if file else path
        if not where.exists():
            broken.append(link)
        elif heading:
            headings = re.findall(r"^#+ (.+)$", where.read_text(encoding="utf-8"), flags=re.MULTILINE)
            if heading not in map(anchor, headings):
                broken.append(link)
    assert not broken


@each_text
def test_options_in_a_text_exist(path):
    """Every ``name=value`` set in a fixed width, and every keyword of a call of ``pm.fit``."""
    text = path.read_text(encoding="utf-8")
    inline = [
        name for word in words(re.sub(r"```.*?```", "", text, flags=re.S)) for name in re.findall(r"^(\w+)=", word)
    ]
    calls = [call for block in blocks(text) for call in re.findall(r"pm\.fit\((.*?)\)\n", block, flags=re.S)]
    in_calls = [name for call in calls for name in re.findall(r"(\w+)=", call)]
    elsewhere = {"method", "total_size", "inference_method", "include_response_params", "centered", "noncentered"}
    assert set(inline + in_calls) <= OPTIONS | OF_METHODS | elsewhere
    without_bambi = re.sub(r"bmb\.Model\(.*\)", "", text)  # its family is that of the likelihood
    for axis, value in re.findall(r'\b(family|update|estimator|step)="(\w+)"', without_bambi):
        assert value in AXES[axis] or (axis, value) == ("family", AUTO), f"{axis}={value}"
