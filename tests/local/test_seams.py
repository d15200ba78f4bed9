"""Replaced attributes: called as documented, refused when they do not fit, restored exactly."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types

import pytest

from pfeife_accelerate import _autoload
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.integration import seams
from pfeife_accelerate.integration.seams import Seam, SeamGroup

pytestmark = pytest.mark.local

LIBRARY = """
class Base:
    def inherited(self):
        return "inherited"

class Thing(Base):
    def __init__(self):
        self.value = 3
    def method(self, x, *rest, **options):
        return ("method", self.value, x, rest, options)
    @staticmethod
    def static(x):
        return ("static", x)
    @classmethod
    def of(cls, x):
        return (cls.__name__, x)
    @property
    def prop(self):
        "A documented property."
        return self.value

def function(x, y=2):
    return x + y
"""

HOOKS = """
calls = []
def around(original, *args, **kwargs):
    calls.append((args, kwargs))
    return ("hooked", original(*args, **kwargs))
def getter(original, self):
    return ("hooked", original(self))
"""


@pytest.fixture
def library(monkeypatch):
    """A library of our own to patch, with a table of its own."""
    modules = {}
    for name, source in (("seam_library", LIBRARY), ("seam_hooks", HOOKS)):
        module = types.ModuleType(name)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        modules[name] = module
    monkeypatch.setattr(seams, "_INSTALLED", seams._Installed())
    return modules["seam_library"]


def table(monkeypatch, *rows):
    found = tuple(
        Seam(owner=owner, name=name, hook=f"seam_hooks:{hook}", signature=signature, when=SeamGroup.ACTIVE)
        for owner, name, hook, signature in rows
    )
    monkeypatch.setattr(seams, "SEAMS", found)
    return found


ALL = (
    ("seam_library:Thing", "method", "around", "(self, x, *rest, **options)"),
    ("seam_library:Thing", "static", "around", "(x)"),
    ("seam_library:Thing", "of", "around", "(cls, x)"),
    ("seam_library:Thing", "prop", "getter", "(self)"),
    ("seam_library", "function", "around", "(x, ...)"),
)


def test_every_kind_of_attribute_is_replaced_and_restored_exactly(library, monkeypatch):
    table(monkeypatch, *ALL)
    before = {name: inspect.getattr_static(library.Thing, name) for name in ("method", "static", "of", "prop")}
    function = library.function
    seams.install(SeamGroup.ACTIVE)
    thing = library.Thing()
    assert thing.method(1, 2, z=3) == ("hooked", ("method", 3, 1, (2,), {"z": 3}))
    assert thing.static(1) == library.Thing.static(1) == ("hooked", ("static", 1))
    assert thing.of(1) == library.Thing.of(1) == ("hooked", ("Thing", 1))
    assert thing.prop == ("hooked", 3)
    assert library.Thing.prop.__doc__ == "A documented property."
    assert library.function(1) == ("hooked", 3)
    assert str(inspect.signature(library.function)) == "(x, y=2)"
    seams.uninstall()
    assert {name: inspect.getattr_static(library.Thing, name) for name in before} == before
    assert library.function is function
    assert seams.installed() == ()


def test_install_twice_wraps_once(library, monkeypatch):
    table(monkeypatch, *ALL)
    seams.install(SeamGroup.ACTIVE)
    seams.install(SeamGroup.ACTIVE)
    assert library.function(1) == ("hooked", 3)
    seams.uninstall()
    seams.uninstall()


def test_other_groups_are_left_alone(library, monkeypatch):
    table(monkeypatch, *ALL)
    seams.install(SeamGroup.LAUNCH)
    assert library.function(1) == 3


def test_another_signature_is_refused_before_anything_is_replaced(library, monkeypatch):
    table(monkeypatch, ALL[0], ("seam_library", "function", "around", "(x, z)"))
    method = library.Thing.method
    with pytest.raises(
        PfeifeError, match=r"PF110 seam_library.function(.|\n)*expected \(x, z\), found \(x, y\)(.|\n)*1.15"
    ):
        seams.install(SeamGroup.ACTIVE)
    assert library.Thing.method is method


def test_a_missing_and_an_inherited_attribute_are_refused(library, monkeypatch):
    table(monkeypatch, ("seam_library:Thing", "gone", "around", "(self)"))
    with pytest.raises(PfeifeError, match="found no such attribute"):
        seams.install(SeamGroup.ACTIVE)
    table(monkeypatch, ("seam_library:Thing", "inherited", "around", "(self)"))
    with pytest.raises(PfeifeError, match="PF110"):
        seams.install(SeamGroup.ACTIVE)


def test_uninstall_refuses_to_undo_a_later_replacement(library, monkeypatch):
    table(monkeypatch, ALL[4])
    seams.install(SeamGroup.ACTIVE)
    monkeypatch.setattr(library, "function", len)
    with pytest.raises(PfeifeError, match=r"PF111 seam_library\.function was replaced again"):
        seams.uninstall()


def test_check_reports_without_changing_anything(library, monkeypatch):
    rows = table(
        monkeypatch, ALL[4], ("seam_library", "gone", "around", "(x)"), ("no_such_library", "f", "around", "()")
    )
    seams.install(SeamGroup.LAUNCH)
    found = seams.check()
    assert [row.seam for row in found] == list(rows)
    assert [(row.matches, row.is_installed, row.found_signature) for row in found] == [
        (True, False, "(x, y)"),
        (False, False, None),
        (False, False, None),
    ]


def test_all_real_seams_fit_the_installed_versions():
    for row in seams.check():
        assert row.matches, row


def test_hooks_of_all_real_seams_exist():
    for seam in seams.SEAMS:
        module, _, name = seam.hook.partition(":")
        assert callable(vars(importlib.import_module(module))[name]), seam


def test_when_imported_calls_back_after_execution_and_leaves_the_loader(tmp_path, monkeypatch):
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    callback = lambda: seen.append(sys.modules["awaited_module"].value)  # noqa: E731
    _autoload.when_imported("awaited_module", callback)
    _autoload.when_imported("awaited_module", callback)
    assert seen == []
    module = importlib.import_module("awaited_module")
    assert seen == [1]
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    _autoload.when_imported("awaited_module", callback)
    assert seen == [1, 1]
    monkeypatch.delitem(sys.modules, "awaited_module")


def test_autoload_never_raises(monkeypatch):
    def broken(*_):
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(_autoload, "when_imported", broken)
    monkeypatch.delenv("PFEIFE_ENABLED", raising=False)
    _autoload.autoload()
    monkeypatch.setenv("PFEIFE_ENABLED", "true")
    with pytest.warns(UserWarning, match=r"could not be loaded and does nothing: RuntimeError\('no hooks today'\)"):
        _autoload.autoload()


def test_accelerate_works_on_where_a_seam_does_not_fit_and_no_pipeline_is_wanted(monkeypatch):
    def unfit(*_):
        raise PfeifeError(id="PF110", what="it has another signature")

    monkeypatch.setattr(seams, "install", unfit)
    for name in [name for name in os.environ if name.startswith("PFEIFE_")]:
        monkeypatch.delenv(name)
    with pytest.warns(UserWarning, match="pfeife_accelerate is not in force: PF110 it has another signature"):
        _autoload._install_seams()
    monkeypatch.setenv("PFEIFE_ENABLED", "true")
    with pytest.raises(PfeifeError, match="PF110"):
        _autoload._install_seams()
