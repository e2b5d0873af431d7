"""What is installed is enough: the wheel away from the checkout, and the packages that it asks for."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from tiny_runs import TINY


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_works_away_from_the_checkout(project_root: Path, tmp_path: Path) -> None:
    """Built and installed without its dependencies, which this environment has."""
    # Built from a copy: a build leaves folders in its source that a later build would pack.
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    unpacked = shutil.ignore_patterns(".*", "build", "*.egg-info", "outputs", "tests", "results")
    shutil.copytree(project_root, source, ignore=unpacked)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=300)
    (site,) = home.glob("lib/python*/site-packages")
    # The packages it needs are those of this environment; the checkout's own is found only where it lies first.
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "needed.pth").write_text(f"{here}\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    empty = tmp_path / "empty"
    empty.mkdir()

    def infini(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin" / "infini"), *arguments]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)

    found = [str(home / "bin" / "python"), "-c", "import cli, conf, infini; print(infini.__file__)"]
    where = subprocess.run(found, cwd=empty, env=environment, capture_output=True, text=True, check=True)
    assert str(site) in where.stdout
    for arguments, code, said in (
        (["--help"], 0, "infini train task=pg19"),
        (["train", "--help"], 0, "infini_linear"),
        (["train", "model=locl"], 2, "did you mean 'local'"),
        (["train", *TINY, "task.data_dir=synthetic"], 0, "trained"),
        (["table"], 0, "Infini-Transformer"),
        (["eval", "task.data_dir=synthetic"], 0, "perplexity"),
    ):
        done = infini(*arguments)
        assert done.returncode == code and said in done.stdout + done.stderr, done
    assert len(list((empty / "outputs" / "results" / "runs").glob("*.json"))) == 2


def test_what_is_imported_is_declared(project_root: Path) -> None:
    """A package that comes along with another one today may not do so tomorrow."""
    project = tomllib.loads((project_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    declared = {re.split(r"[^\w-]", text)[0].lower().replace("_", "-") for text in texts}
    sources = [project_root / "cli.py", *(p for top in ("infini", "tasks") for p in (project_root / top).rglob("*.py"))]
    imported: set[str] = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            imported |= {name.split(".")[0] for name in names}
    own = {"infini", "tasks", "cli", "conf"}
    packages = importlib.metadata.packages_distributions()
    for name in sorted(imported - own - sys.stdlib_module_names):
        distributions = {found.lower().replace("_", "-") for found in packages.get(name, [name])}
        assert distributions & declared, f"{name} is imported and of no declared package"
    pinned = (project_root / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert all(f"{name}==" in pinned for name in declared)
