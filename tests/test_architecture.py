"""The rules of the layout: which way imports run, how long a file is, what may load at start."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# What a user causes: there is always something to do about it.
CAUSED = {"InputError", "UsageError", "NetworkError"}
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mla_cli"
LINKED = ("kernels", "converters", "calibration")
MAX_LINES = 400

# A part imports parts to its left only. Parts of one rank are peers: they do not import each other, but for PEERS.
ORDER = (
    ("mla_cli",),
    ("errors", "console"),
    ("report",),
    ("kernels",),
    ("model",),
    ("checkpoint",),
    ("calibration", "converters", "runtime"),
    ("evaluation", "benchmark", "server"),
    ("commands",),
    ("app",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
PEERS = {("converters", "calibration"), ("runtime", "calibration")}
LIGHT = ("mla_cli", "app", "commands", "console", "errors", "__main__")
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "triton",
    "datasets",
    "matplotlib",
    "lm_eval",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
}


@dataclass(frozen=True)
class Import:
    """`importer` imports `imported`; `lazy` inside a function."""

    importer: str
    imported: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_files() -> dict[str, Path]:
    """Module name -> file, of every file of the package (through the links)."""
    folders = [PACKAGE, *(PACKAGE / name for name in LINKED)]
    files = {path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts}
    names = {}
    for path in sorted(files):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_files()


def imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield Import(module, inner if inner in MODULES else origin, node.lineno, lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        # What only the type checker reads is no work at start, though it is still a dependency.
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside or (checking and child not in getattr(node, "orelse", [])))

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), lazy=False)


IMPORTS = [found for module, path in MODULES.items() for found in imports_of(module, path)]


def root(found: Import) -> str:
    return found.imported.split(".")[0]


OWN = [found for found in IMPORTS if root(found) == "mla_cli"]


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else names[0]


def test_every_part_has_a_place_in_the_order() -> None:
    unplaced = sorted({part_of(module) for module in MODULES} - set(RANK))
    assert not unplaced, f"add to ORDER: {unplaced}"


def test_imports_run_one_way() -> None:
    wrong = []
    for found in OWN:
        importer, imported = part_of(found.importer), part_of(found.imported)
        allowed = importer == imported or RANK[imported] < RANK[importer] or (importer, imported) in PEERS
        if not allowed:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {f.imported for f in OWN if f.importer == module and not f.lazy} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(graph.get(module, set()) - {module}):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_no_packages_of_their_own(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists(), "it would shadow the package of this name on PyPI"
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_linked_folders_are_imported_through_mla_cli_only() -> None:
    tests = [found for path in (ROOT / "tests").rglob("*.py") for found in imports_of(f"tests.{path.stem}", path)]
    scripts = [found for path in ROOT.glob("scripts/*.py") for found in imports_of(f"scripts.{path.stem}", path)]
    wrong = [str(found) for found in [*IMPORTS, *tests, *scripts] if root(found) in LINKED]
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    long = {module: lines for module, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_transformers_is_never_loaded_at_import() -> None:
    wrong = [str(found) for found in IMPORTS if root(found) == "transformers" and not found.lazy]
    assert not wrong, "\n".join(wrong)


def test_the_program_starts_without_anything_heavy() -> None:
    eager = [found for found in IMPORTS if not found.lazy]
    loaded: dict[str, str] = {}  # module -> how it came to be loaded
    waiting = [(module, module) for module in MODULES if part_of(module) in LIGHT]
    while waiting:
        module, way = waiting.pop()
        if module in loaded:
            continue
        loaded[module] = way
        parents = [module.rpartition(".")[0]] if "." in module else []
        imported = [found.imported for found in eager if found.importer == module]
        waiting += [(name, f"{way} -> {name}") for name in [*parents, *imported] if name in MODULES]
    heavy = [f"{loaded[f.importer]} -> {f.imported}" for f in eager if f.importer in loaded and root(f) in HEAVY]
    assert not heavy, "\n".join(heavy)


@pytest.mark.parametrize("part", ["benchmark", "checkpoint", "commands", "evaluation", "model", "runtime", "server"])
def test_an_error_that_a_user_causes_says_what_to_do(part: str) -> None:
    without = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((PACKAGE / part).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in CAUSED
        and "fix" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []
