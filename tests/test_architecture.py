"""The shape of the code base, enforced: who imports whom, how long things are, where the forbidden things live.

Parts that do not exist yet are skipped; a part that appears is held to its row at once.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pfeife_accelerate"

#: part -> what it may import beside itself; "a.b" allows that module alone. Function-level imports count.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "compat": {"errors"},
    "ir": {"errors"},
    "schedule": {"ir", "errors"},
    "planner": {"schedule", "ir", "errors", "log"},
    "cost": {"ir", "errors", "log", "compat"},
    "capture": {"ir", "errors", "log", "compat"},
    "runtime": {"schedule", "ir", "errors", "log", "compat"},
    "checkpoint": {"runtime", "ir", "errors", "log"},
    "config": {"planner", "cost", "runtime", "checkpoint", "ir", "errors"},
    "session": {
        "config", "planner", "cost", "capture", "runtime", "checkpoint", "schedule", "ir", "errors", "log", "compat",
    },
    "integration": {"session", "config", "capture.deferred", "compat", "ir", "errors", "log"},
    # The edge: the entry point arms the integration, the package root names what is public.
    "_autoload": {"integration"},
    "__init__": {"*"},
    "tools": {"*"},
    # A folder of its own in the repository (without its benchmarks), `pfeife_accelerate.zoo` once it is installed.
    "zoo": {"errors"},
}  # fmt: skip
#: Of these parts, `config` may only take their Options.
OPTIONS_ONLY = ("planner", "cost", "runtime", "checkpoint")
PURE_PARTS = ("errors", "log", "ir", "schedule", "planner")
FILE_LINES, FUNCTION_LINES = 400, 60


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _package_files() -> list[Path]:
    """All that an installed package has."""
    return [*_files(PACKAGE), *sorted((ROOT / "zoo").glob("*.py"))]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if node is not None and hasattr(node, "lineno") else ""
    return f"{path.relative_to(ROOT)}{line}"


def _part(path: Path) -> str:
    """The row of the table that a file belongs to."""
    if path.is_relative_to(ROOT / "zoo"):
        return "zoo"
    name = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
    return "compat" if name.startswith("compat_") else name


def _imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str | None]]:
    """(statement, module, imported name) of every import, by statement or by `import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")) and isinstance(node.args[0].value, str):
                yield node, node.args[0].value, None


def _own_imports(path: Path) -> Iterator[tuple[ast.AST, str, str | None]]:
    """(statement, dotted module below the package, imported name)."""
    for node, module, name in _imports(_tree(path)):
        if module == PACKAGE:  # `from pfeife_accelerate import x`: a part, or a public name of the root
            is_part = name == "zoo" or (
                name is not None and ((ROOT / PACKAGE / name).is_dir() or (ROOT / PACKAGE / f"{name}.py").is_file())
            )
            yield node, name if is_part and name else "__init__", name
        elif module.startswith(PACKAGE + "."):
            yield node, module.removeprefix(PACKAGE + "."), name


def _allowed(importer: str, module: str, name: str | None) -> bool:
    part = module.split(".")[0]
    part = "compat" if part.startswith("compat_") else part
    rules = MAY_IMPORT[importer]
    if part == importer or "*" in rules or part in rules:
        return True
    return any(rule in (module, f"{module}.{name}") or module.startswith(rule + ".") for rule in rules if "." in rule)


def test_every_file_belongs_to_a_part_of_the_table():
    unknown = sorted({_part(path) for path in _package_files()} - set(MAY_IMPORT))
    assert not unknown, f"add {unknown} to MAY_IMPORT, and to the table in docs"


def test_parts_import_only_what_the_table_allows():
    wrong = [
        f"{_place(path, node)}: {_part(path)} may not import {module}"
        for path in _package_files()
        if _part(path) in MAY_IMPORT
        for node, module, name in _own_imports(path)
        if not _allowed(_part(path), module, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_config_takes_only_the_options_of_the_parts():
    path = ROOT / PACKAGE / "config.py"
    wrong = [
        f"{_place(path, node)}: {name} of {module}"
        for node, module, name in _own_imports(path)
        if module.split(".")[0] in OPTIONS_ONLY and not (name or "").endswith("Options")
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute():
    wrong = [
        _place(path, node)
        for path in _package_files()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong, wrong


def test_the_table_has_no_cycle():
    """Whatever the files do, the table itself must be a one-way street."""
    left = {part: {rule.split(".")[0] for rule in rules} - {"*"} for part, rules in MAY_IMPORT.items()}
    while free := [part for part, rules in left.items() if not rules & left.keys()]:
        for part in free:
            del left[part]
    assert not left


def test_files_and_functions_are_short():
    wrong = []
    for path in _files(PACKAGE, "zoo", "training_scripts"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            wrong.append(f"{_place(path)}: {lines} lines, at most {FILE_LINES}")
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{_place(path, node)}: {node.name} has {length} lines, at most {FUNCTION_LINES}")
    assert not wrong, "\n".join(wrong)


# -- names that live in one place --------------------------------------------------------------------------------------


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported local name stands for, dotted."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
                else:
                    found[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The full name of an attribute chain that starts at an imported name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(names)])


def _used_names(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every dotted name of an imported module that is imported or reached by attributes."""
    aliases = _aliases(tree)
    for node, module, name in _imports(tree):
        yield node, f"{module}.{name}" if name else module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node, aliases)):
            yield node, dotted


def _is_private(dotted: str) -> bool:
    head, *rest = dotted.split(".")
    return head in ("torch", "accelerate") and any(n.startswith("_") and not n.endswith("__") for n in rest)


def test_private_names_of_torch_and_accelerate_live_in_compat():
    wrong = {
        f"{_place(path, node)}: {dotted}"
        for path in _files(PACKAGE, "zoo", "training_scripts", "examples")
        if not (path.is_relative_to(ROOT / PACKAGE) and _part(path) == "compat")
        for node, dotted in _used_names(_tree(path))
        if _is_private(dotted)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_the_environment_is_read_in_config():
    forbidden = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    wrong = {
        f"{_place(path, node)}: {dotted}"
        for path in _package_files()
        if path.relative_to(ROOT).as_posix() not in (f"{PACKAGE}/config.py", f"{PACKAGE}/_autoload.py")
        for node, dotted in _used_names(_tree(path))
        if any(dotted == name or dotted.startswith(name + ".") for name in forbidden)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_only_tools_print():
    wrong = [
        _place(path, node)
        for path in _package_files()
        if _part(path) != "tools"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, wrong


# -- documentation -----------------------------------------------------------------------------------------------------


def _public_definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node.body)


def _says_it_elsewhere(node: ast.AST) -> bool:
    """Overloads and overrides are documented where they come from; a setter at its property."""
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
    return any(d.split(".")[-1] in ("overload", "override", "setter", "deleter") for d in decorators)


def test_modules_and_public_names_have_docstrings():
    wrong = []
    for path in _files(PACKAGE, "zoo"):
        tree = _tree(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{_place(path)}: the module")
        wrong += [
            f"{_place(path, node)}: {node.name}"
            for node in _public_definitions(tree.body)
            if not ast.get_docstring(node) and not _says_it_elsewhere(node)
        ]
    assert not wrong, "\n".join(wrong)


# -- what must not be needed -------------------------------------------------------------------------------------------


def test_pure_parts_import_with_torch_and_accelerate_blocked():
    parts = [p for p in PURE_PARTS if (ROOT / PACKAGE / p).is_dir() or (ROOT / PACKAGE / f"{p}.py").is_file()]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in _package_files()
        if _part(path) in parts
    ]
    code = (
        "import sys, importlib\n"
        "for name in ('torch', 'accelerate', 'transformers'): sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pure_parts_use_the_standard_library_and_numpy_alone():
    known = {*sys.stdlib_module_names, "numpy", PACKAGE}
    wrong = [
        f"{_place(path, node)}: {module}"
        for path in _package_files()
        if _part(path) in PURE_PARTS
        for node, module, _ in _imports(_tree(path))
        if module.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_scripts_run_without_us():
    """Examples and training scripts are plain Accelerate scripts; those about our Python API say so in their name."""
    wrong = [
        f"{_place(path, node)}: {module}"
        for path in _files("examples", "training_scripts")
        if not path.stem.startswith("python_api")
        for node, module, _ in _imports(_tree(path))
        if module.split(".")[0] == PACKAGE
    ]
    assert not wrong, "\n".join(wrong)
