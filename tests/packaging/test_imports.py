"""Every import points down: the floors of the house, read from the source, and the imports a library user lacks."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("infini/**/*.py"), *ROOT.glob("tasks/**/*.py")])
_FLOOR = "ops protocols state grid records config schema schema_running lengths errors paths"
GROUND = tuple(f"infini.{name}" for name in _FLOOR.split())
LAZY = ("wandb", "datasets", "tensorboard")
FRAMEWORKS = ("hydra", "omegaconf", "lightning", "pytorch_lightning", "wandb", "datasets")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_only: bool = False) -> set[str]:
    """Modules that the file imports, dotted; with `top_only`, those that importing the file brings."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), top_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: relative import; this project writes them in full"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def statements(tree: ast.AST, top_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node, top_only)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_house_is_not_empty() -> None:
    names = {module_name(path) for path in SOURCES}
    assert {"infini.nn.ops", "infini.config", "infini.report", "infini.tasks.pg19"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    name, imported = module_name(path), imports(path)
    inside = {module for module in imported if within(module, "infini")}
    if within(name, "tasks"):
        assert not any(within(module, "infini.commands") for module in inside)
        return
    if not within(name, "infini.commands"):
        assert not any(within(module, "tasks") for module in imported), "infini does not know tasks: a command does"
        assert not any(within(module, "infini.commands") for module in inside)
    if any(within(name, floor) for floor in GROUND):
        above = {module for module in inside - {"infini"} if not any(within(module, floor) for floor in GROUND)}
        assert not above, f"ground floor imports {sorted(above)}"
    if within(name, "infini.report"):
        barred = ("infini.models", "infini.training", "infini.nn.attention", "infini.nn.ops", "torch")
        assert not [module for module in imported if any(within(module, bar) for bar in barred)]
    if within(name, "infini.models") or name == "infini.nn.attention":
        assert not any(within(module, "infini.training") or within(module, "infini.report") for module in inside)
    assert not any(within(module, "cli") for module in imported)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_hub_and_loggers_are_imported_where_they_are_used(path: Path) -> None:
    if within(module_name(path), "infini"):
        top = imports(path, top_only=True)
        assert not [module for module in top if any(within(module, lazy) for lazy in LAZY)]


BLOCKED = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMEWORKS!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> None:
    command = [sys.executable, "-c", BLOCKED + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_layer_needs_torch_only() -> None:
    run_blocked(
        "import infini\n"
        "assert 'torch' not in sys.modules\n"
        "from infini import InfiniAttention\n"
        "import torch\n"
        "layer = InfiniAttention(d_model=16, n_heads=2, d_key=8, segment_length=4)\n"
        "y_BTD, state = layer(torch.randn(2, 9, 16), None)\n"
        "assert y_BTD.shape == (2, 9, 16)\n"
    )


def test_the_library_imports_without_the_frameworks() -> None:
    """What composes (config) and what trains (commands, training) needs them; nothing else does."""
    framework_users = ("infini.config", "infini.commands", "infini.training")
    names = [module_name(path) for path in SOURCES]
    library = [
        name for name in names if within(name, "infini") and not any(within(name, user) for user in framework_users)
    ]
    run_blocked(f"for name in {library!r}: importlib.import_module(name)\n")


def test_reports_and_records_need_no_torch() -> None:
    names = [module_name(path) for path in SOURCES]
    light = [name for name in names if within(name, "infini.report") or name in ("infini.records", "infini.config")]
    code = f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
