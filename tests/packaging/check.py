"""Look into wheel and source distribution, install each into a new environment outside the checkout, and try it.

``make wheel`` runs it: ``python tests/packaging/check.py dist``, on a wheel that was built of the checkout.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile

from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMOKE = Path(__file__).with_name("smoke.py")
#: Files that the build adds to the source distribution. Where there is no git to list the others: some of them, and
#: parts of paths that should not be there.
MADE = {"PKG-INFO"}
IN_SDIST = ("pyproject.toml", "Makefile", "docs/conf.py", "docs/index.md", "examples/epilepsy.py", "tests/conftest.py")
NOT_IN_SDIST = ("docs/_build/", "docs/examples/", "examples/output/", "__pycache__", ".venv", ".egg-info")


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} should have one {pattern}; it has {[path.name for path in found]}.")
    return found[0]


def sources(package: Path) -> set[str]:
    """Return the files of a package, relative to its parent."""
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in files}


def tracked() -> set[str]:
    """Return the files that git knows; empty where there is no checkout."""
    if not (ROOT / ".git").exists():
        return set()
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name}


def content(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_wheel(wheel: Path, expected: set[str]) -> bytes:
    """Compare with the package in the checkout; its licence should be there, too. Return its metadata."""
    files = content(wheel)
    packed = {name for name in files if ".dist-info/" not in name}
    if packed != expected:
        raise SystemExit(f"{wheel.name} lacks {sorted(expected - packed)} and has {sorted(packed - expected)} besides.")
    if not any(name.endswith("/LICENSE") for name in files):
        raise SystemExit(f"{wheel.name} has no licence.")
    return next(text for name, text in files.items() if name.endswith(".dist-info/METADATA"))


def check_sdist(sdist: Path, expected: set[str]) -> bytes:
    """All that is tracked should be there, and nothing that was made from it. Return its metadata."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2]: name for name in archive.getnames()}
        info = archive.extractfile(names["PKG-INFO"])
        assert info is not None
        metadata = info.read()
    known = tracked()
    missing = sorted((expected | set(IN_SDIST) | known) - set(names))
    extra = {name for name in names if any(part in name for part in NOT_IN_SDIST)}
    extra |= set(names) - known - MADE if known else set()
    if missing or extra:
        raise SystemExit(f"{sdist.name} lacks {missing} and has {sorted(extra)} besides.")
    return metadata


def check_metadata(raw: bytes) -> None:
    """They should be valid, and say what pyproject.toml does; the description is the README with absolute links."""
    found = Metadata.from_email(raw)  # raises where a field is not valid
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_extras = [f"{one}; extra == '{name}'" for name, group in extras.items() for one in group]
    requirements = sorted(str(Requirement(one)) for one in [*project["dependencies"], *of_extras])
    expected = {
        "name": project["name"],
        "version": Version(project["version"]),
        "summary": project["description"],
        "license_expression": project["license"],
        "license_files": project["license-files"],
        "requires_python": SpecifierSet(project["requires-python"]),
        "classifiers": project["classifiers"],
        "provides_extra": sorted(extras),
        "project_urls": project.get("urls", {}),
        "description_content_type": "text/markdown",
    }
    wrong = [name for name, value in expected.items() if (getattr(found, name) or type(value)()) != value]
    shown, base = found.description or "", f"{project['urls']['Repository']}/(?:raw|blob)/{project['version']}/"
    if re.sub(rf"\]\({base}", "](", shown) != README or re.search(r"\]\((?!https:|#)", shown):
        wrong.append("description")
    if sorted(map(str, found.requires_dist or [])) != requirements:
        wrong.append("requires_dist")
    if wrong:
        raise SystemExit(f"The metadata are not those of pyproject.toml: {', '.join(wrong)}.")
    if any(one.startswith("License ::") for one in project["classifiers"]):
        raise SystemExit("The licence is an expression (PEP 639): a classifier may not name one, too.")


def run(*command: str | Path, where: str) -> None:
    """Run a command in a folder."""
    subprocess.run([*map(str, command)], check=True, cwd=where)


def try_both(wheel: Path, sdist: Path) -> None:
    """Install the wheel, then the source distribution, and run `smoke.py` where the checkout can't be imported.

    What is built from the source distribution should be the wheel, to the byte.
    """
    with tempfile.TemporaryDirectory(prefix="pymc_ngvi_release_") as folder:
        builder = venv.EnvBuilder(with_pip=True)
        builder.create(folder)
        python = builder.ensure_directories(folder).env_exe
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "install", wheel, where=folder)
        run(*pip, "check", where=folder)
        run(python, "-I", SMOKE, where=folder)
        run(*pip, "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", "built", sdist, where=folder)
        built = only(Path(folder) / "built", "*.whl")
        if content(built) != content(wheel):
            raise SystemExit(f"{sdist.name} builds another wheel than {wheel.name}.")
        run(*pip, "uninstall", "--yes", "pymc-ngvi", where=folder)
        run(*pip, "install", "--no-deps", "--no-cache-dir", sdist, where=folder)
        run(*pip, "check", where=folder)
        run(python, "-I", SMOKE, where=folder)


def main() -> None:
    """Check what a folder has."""
    folder = Path(sys.argv[1]).resolve()
    expected = sources(ROOT / "pymc_ngvi")
    wheel, sdist = only(folder, "*.whl"), only(folder, "*.tar.gz")
    metadata = check_wheel(wheel, expected)
    if check_sdist(sdist, expected) != metadata:
        raise SystemExit("Wheel and source distribution have different metadata.")
    check_metadata(metadata)
    try_both(wheel, sdist)


if __name__ == "__main__":
    main()
