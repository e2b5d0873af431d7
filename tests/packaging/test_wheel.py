"""The wheel and the sdist install `infini` alone, and it works away from the checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny_runs import TINY

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
USERS = {"tasks/__init__.py": "", "conf/__init__.py": "", "conf/config.yaml": "mine: 1\n", "cli.py": ""}
"""A user's own modules, of the names that our folders have in a checkout."""
TRAIN_THE_LAYER = """
import importlib.util, torch
from infini import InfiniAttention, load_state, save_state
for name in ("hydra", "lightning", "wandb", "datasets", "transformers", "yaml", "safetensors", "rich", "scipy"):
    assert importlib.util.find_spec(name) is None, name
torch.manual_seed(0)
layer = InfiniAttention(d_model=16, n_heads=2, d_key=8, segment_length=8, update_rule="delta")
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
x, state, losses = torch.randn(2, 160, 16), None, []
for chunk in x.split(40, 1):
    y, state = layer(chunk, state)
    loss = (y - chunk.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = state.detach()
    losses.append(float(loss.detach()))
assert losses[-1] < losses[0]
save_state(state, "state.pt")
y, _ = layer(x[:, :5], load_state(layer.init_state(2), "state.pt"))
assert torch.equal(y, layer(x[:, :5], state)[0])
"""


def packages_of_the_checkout() -> set[str]:
    """Every folder with modules or YAML, under the name that it is installed as."""
    places = {"infini": "infini", "tasks": "infini.tasks", "conf": "infini.conf"}
    found = set()
    for top, name in places.items():
        for path in (ROOT / top).rglob("*.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / top).parts]))
    return found


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def checked(*command: object, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    # Built from a copy: a build leaves folders in its source that a later build would pack.
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "outputs"))
    checked(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def environment_with(home: Path, required: Iterable[str], *installed: str | Path) -> Path:
    """A new environment with what pip installs from these words, and links to the distributions of these names and
    what they require; its site-packages."""
    venv.create(home, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    checked(*pip, "install", "--quiet", "--no-deps", *installed, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in with_requirements(required).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return site


def with_requirements(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names, and of all that they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        required = [Requirement(text) for text in found[name].requires or []]
        open_names += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_and_the_sdist_hold_infini_alone(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {name.parts[0].partition("-")[0] for name in names} == {"infini", "infini_attention_suite"}
    held = {".".join(name.parent.parts) for name in names if name.suffix == ".py"}
    assert held == packages_of_the_checkout()
    configuration = {name.relative_to("infini/conf") for name in names if name.suffix == ".yaml"}
    assert configuration == {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    model = {name.name for name in names if name.parts[:2] == ("infini", "demo")}
    assert model == {"__init__.py", "config.json", "model.safetensors", "tokenizer.json"}
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"infini", "tasks", "conf", "README.md", "LICENSE", "pyproject.toml"} <= tops
    assert not {"results", "outputs", "build"} & tops


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_an_installation_works_beside_modules_of_the_same_names(
    built: tuple[Path, Path], tmp_path: Path, editable: bool
) -> None:
    """It runs from another folder, with only the packages of `dependencies`, taken from this environment."""
    home, elsewhere, source = tmp_path / "env", tmp_path / "elsewhere", built[1].parent / "source"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(text).name for text in project["dependencies"]]
    site = environment_with(home, needed, *(["--editable", source] if editable else [built[1]]))
    elsewhere.mkdir()
    for folder in (site, elsewhere):
        for name, text in USERS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    show = "import cli, conf, infini, tasks\nfor module in (cli, conf, tasks, infini): print(module.__file__)"
    *users, ours = checked(home / "bin" / "python", "-c", show, cwd=elsewhere).splitlines()
    assert all(Path(path).is_relative_to(elsewhere) for path in users)
    assert Path(ours).is_relative_to(source if editable else site)
    for arguments, code, said in (
        (["--help"], 0, "infini train task=pg19"),
        (["train", "--help"], 0, "infini_linear"),
        (["train", "model=locl"], 2, "did you mean 'local'"),
        (["train", *TINY, "task.data_dir=synthetic"], 0, "trained"),
        (["table"], 0, "Transformer-XL" if editable else "published records: not part of the installed package"),
        (["eval", "task.data_dir=synthetic"], 0, "perplexity"),
        (["demo", "key=12345", "length=32K"], 0, "answer  12345, right"),
    ):
        done = run(home / "bin" / "infini", *arguments, cwd=elsewhere)
        assert done.returncode == code and said in done.stdout + done.stderr, done
    assert len(list((elsewhere / "outputs" / "results" / "runs").glob("*.json"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_layer_trains_where_torch_and_numpy_are_all_there_is(built: tuple[Path, Path], tmp_path: Path) -> None:
    """An environment of links to torch, numpy and what torch requires."""
    home = tmp_path / "env"
    environment_with(home, ["torch", "numpy"], built[1])
    checked(home / "bin" / "python", "-W", "error::UserWarning", "-c", TRAIN_THE_LAYER, cwd=tmp_path)


def test_every_package_folder_is_declared() -> None:
    """setuptools installs the packages that [tool.setuptools] lists, and silently leaves out the others."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert sorted(declared) == declared and set(declared) == packages_of_the_checkout()


def test_the_model_of_the_demo_is_package_data(project_root: Path) -> None:
    """The wheel has the folder's files that [tool.setuptools.package-data] names."""
    declared = tomllib.loads((project_root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = declared["package-data"]["infini.demo"]
    held = {path.name for pattern in patterns for path in (project_root / "infini" / "demo").glob(pattern)}
    assert held == {"config.json", "model.safetensors", "tokenizer.json"}


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
