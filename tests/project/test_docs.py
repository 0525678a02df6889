"""The facts of the documentation: each entry, option and public name is there, links resolve, snippets run."""

import inspect
import itertools
import re

import pytest

from texts import DOCS, ROOT, anchor, blocks, rows, section, words

from pymc_ngvi import NGVI, NGVIApproximation, fit_many
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.fitting.options import ALLOWED, AUTO, AXES, RULES, choose

CHOOSING = DOCS / "choosing.md"
FOLDERS = {"family": "families", "update": "updates", "estimator": "estimators", "step": "steps"}
ENTRIES = [(axis, name) for axis in AXES for name in AXES[axis]]
PAGES = {(axis, name): DOCS / FOLDERS[axis] / f"{name}.md" for axis, name in ENTRIES}
#: The family that implies a rule, by the rule.
BY_RULE = {family.traits.own_rule: name for name, family in FAMILIES.items() if family.traits.own_rule}
OPTIONS = {*inspect.signature(NGVI.__init__).parameters, *inspect.signature(NGVI.fit).parameters} - {"unknown"}
OF_MANY = set(inspect.signature(fit_many).parameters)
OF_METHODS = {
    parameter
    for name, method in inspect.getmembers(NGVIApproximation, inspect.isfunction)
    if not name.startswith("_")
    for parameter in inspect.signature(method).parameters
}

each_page = pytest.mark.parametrize(("axis", "name"), ENTRIES, ids=lambda value: value)


# --- pages ------------------------------------------------------------------------------------------------------------


def test_there_is_one_page_for_each_entry_and_no_other():
    found = {path for folder in FOLDERS.values() for path in (DOCS / folder).glob("*")}
    assert found == set(PAGES.values())


@each_page
def test_a_page_says_what_goes_with_it(axis, name):
    listed = dict(re.findall(r"^- (\w+): (.+?)(?=^- |\n\n)", section(PAGES[axis, name], "Goes with"), re.M | re.S))
    at = list(AXES).index(axis)
    for i, other in enumerate(AXES):
        if other != axis:
            expected = {row[i] for row in ALLOWED if row[at] == name} & set(AXES[other])
            assert set(words(listed.pop(other))) == expected, other
    assert not listed


@pytest.mark.parametrize("rule", RULES)
def test_the_page_of_a_step_rule_or_of_its_family_lists_the_options_that_it_takes(rule):
    page = PAGES["step", rule] if rule in AXES["step"] else PAGES["family", BY_RULE[rule]]
    listed = [words(row[0])[0] for row in rows(section(page, "Options"))]
    assert sorted(listed) == sorted(RULES[rule].takes)


@each_page
def test_the_example_of_a_page_is_of_its_entry(axis, name):
    assert any(f'{axis}="{name}"' in block for block in blocks(PAGES[axis, name].read_text(encoding="utf-8")))


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_choosing_links_to_every_page():
    links = re.findall(r"\]\(([^)#]+)\)", CHOOSING.read_text(encoding="utf-8"))
    linked = {(DOCS / link).resolve() for link in links}
    assert set(PAGES.values()) <= linked


def test_the_table_of_what_goes_with_what_is_the_registry():
    listed = []
    for update, estimators, families, steps in rows(section(CHOOSING, "What goes with what")):
        own = [FAMILIES[family].traits.own_rule for family in words(families)]
        listed += itertools.product(words(families), words(update), words(estimators), words(steps) or own)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(ALLOWED)


def test_what_is_chosen_for_one_word():
    listed = {}
    for given, *chosen in rows(section(CHOOSING, "What is chosen")):
        axis, name = re.fullmatch(r'`(\w+)="(\w+)"`', given).groups()
        listed[axis, name] = tuple(word for cell in chosen for word in words(cell))
    assert listed == {(axis, name): tuple(choose(**{axis: name}).given().values()) for axis, name in ENTRIES}


def test_the_options_in_choosing_go_with_what_it_says():
    listed = {words(row[0])[0]: row[1] for row in rows(section(CHOOSING, "Options"))}
    assert set(listed) <= OPTIONS
    for name, rule_names in listed.items():
        takes = {BY_RULE.get(rule, rule) for rule, kind in RULES.items() if name in kind.takes}
        if takes:
            named = set(words(rule_names))
            but = rule_names.startswith("all")
            assert takes == ({BY_RULE.get(rule, rule) for rule in RULES} - named if but else named), name
    of_rules = set().union(*(kind.takes for kind in RULES.values()))
    assert of_rules | {"tol", "stl", "factor", "blocks", "reparam", "components"} == set(listed)


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
    elsewhere = {"method", "total_size", "inference_method", "centered", "noncentered"}
    assert set(inline + in_calls) <= OPTIONS | OF_MANY | OF_METHODS | elsewhere
    without_bambi = re.sub(r"bmb\.Model\(.*\)", "", text)  # its family is that of the likelihood
    for axis, value in re.findall(r'\b(family|update|estimator|step)="(\w+)"', without_bambi):
        assert value in AXES[axis] or (axis, value) == ("family", AUTO), f"{axis}={value}"
