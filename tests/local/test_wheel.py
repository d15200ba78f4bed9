"""What an installed package has: all of it, the zoo as a part of it, and no benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The files of a wheel, built from a copy of the sources by the setuptools that is installed."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("pfeife_accelerate", "zoo"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_is_in_the_wheel(names):
    package = [path.relative_to(ROOT).as_posix() for path in (ROOT / "pfeife_accelerate").rglob("*.py")]
    assert set(package) <= names and "pfeife_accelerate/py.typed" in names


def test_the_zoo_is_in_it_under_the_package_s_name(names):
    zoo = [path.relative_to(ROOT).as_posix() for path in (ROOT / "zoo").glob("*.py")]
    zoo += [path.relative_to(ROOT).as_posix() for path in (ROOT / "zoo" / "configs").rglob("*.json")]
    assert {f"pfeife_accelerate/{name}" for name in zoo} == {n for n in names if n.startswith("pfeife_accelerate/zoo/")}
    assert len(zoo) > 12


def test_it_claims_no_other_name(names):
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pfeife_accelerate"}
    assert not [name for name in names if "benchmarks" in name]
