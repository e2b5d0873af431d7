"""The modules that an import loads. `make lint` checks which modules may import which: [tool.importlinter]."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY, write_corpus

import infini
import infini.conf
import infini.tasks
from infini.commands import verbs
from infini.config.compose import compose
from infini.runs.preflight import describe_training
from infini.system.devices import has_gpu
from infini.training.checkpoint import checksum

FRAMEWORKS = ("hydra", "omegaconf", "lightning", "pytorch_lightning", "wandb", "datasets")
FRAMEWORK_USERS = ("config", "runs", "tasks", "training", "bench", "cli", "commands")
"""Packages that compose, train or read data."""


def modules_of(*packages: str) -> list[str]:
    """All modules of these packages of infini."""
    found = []
    for package in packages:
        name = f"infini.{package}"
        found.append(name)
        for folder in (Path(path) / package for path in infini.__path__):
            found += [module.name for module in pkgutil.walk_packages([str(folder)], f"{name}.")]
    return found


def python(code: str, tmp_path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(*packages: str) -> str:
    """Code after which these packages cannot be imported."""
    return f"""
import importlib, importlib.util, sys

def is_blocked(name):
    return name.partition(".")[0] in {packages!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if is_blocked(name):
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
# Libraries that ask whether a package is installed are told that it is not.
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if is_blocked(name) else find_spec(name, package)
"""


def test_a_checkout_that_is_not_installed_says_so(project_root: Path) -> None:
    # -S hides all installations.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    call = [sys.executable, "-S", str(project_root / "cli.py"), "--help"]
    done = subprocess.run(call, env=clean, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infini: error: this checkout is not installed; run `make env`\n"


def test_the_layer_needs_torch_only(tmp_path: Path) -> None:
    code = """
import infini
assert "torch" not in sys.modules
from infini import InfiniAttention
import torch
layer = InfiniAttention(d_model=16, n_heads=2, d_key=8, segment_length=4)
y_BTD, state = layer(torch.randn(2, 9, 16))
assert y_BTD.shape == (2, 9, 16)
# Models of transformers are known without it.
from infini.models import registered
assert {"llm", "bart"} <= set(registered())
"""
    python(without(*FRAMEWORKS, "transformers", "yaml", "safetensors", "rich", "scipy") + code, tmp_path)


def test_the_library_imports_without_the_frameworks(tmp_path: Path) -> None:
    packages = [module.name for module in pkgutil.iter_modules(infini.__path__) if module.ispkg]
    library = modules_of(*(package for package in packages if package not in FRAMEWORK_USERS))
    assert {"infini.nn.attention", "infini.models.infini", "infini.report.stats"} <= set(library)
    python(without(*FRAMEWORKS) + f"for name in {library!r}: importlib.import_module(name)\n", tmp_path)


def test_reports_and_the_configuration_need_no_torch(tmp_path: Path) -> None:
    light = [*modules_of("report", "config", "commands", "cli"), "infini.records"]
    code = f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\n"
    python(code + "assert 'torch' not in sys.modules", tmp_path)


def test_what_is_slow_to_import_is_imported_where_it_is_used(tmp_path: Path) -> None:
    """Lightning brings matplotlib and transformers along: seconds, and 200 MB of the peak that the demo prints. The
    compiler of torch takes a second, for whoever imports the layer, too. Most trainings need no hub and no logger."""
    code = "import sys, infini.nn.attention, infini.runs.demo\n"
    heavy = ("lightning", "matplotlib", "transformers", "torch._dynamo")
    code += f"assert not set({heavy!r}) & set(sys.modules)\nimport infini.runs.train, infini.tasks.pg19.task\n"
    python(code + "assert not {'wandb', 'datasets', 'tensorboard'} & set(sys.modules)", tmp_path)


HEAVY = ("torch", "lightning", "transformers", "datasets", "matplotlib", "wandb")


REFUSED = [
    ("train task=pg19 task.data_dir={0}/no", "task.data_dir='{0}/no': {0}/no/train does not exist"),
    ("train task=booksum task.data_dir={0}/no", "task.data_dir='{0}/no': {0}/no/train.jsonl does not exist"),
    ("train results_dir=/proc/no", "results_dir='/proc/no': cannot be written"),
    ("train init_from=no", "init_from='no': neither a folder nor a run id"),
    ("train model=llm model.base={0}/no", "model.base='{0}/no': no such folder"),
    (
        "train",
        "no data for pg19: set INFINI_DATA_DIR to a folder that holds pg19/{{train,validation,test}}/*.txt",
    ),
    (
        "eval task=booksum checkpoint={1}",
        "no data for booksum: set INFINI_DATA_DIR to a folder that holds booksum/",
    ),
    ("demo length=10", "length=10: must be at least 221 tokens, for example 1K"),
    ("train task=pg19 parallel.devices=2", "parallel.devices=2: parallel=single takes one; add parallel=ddp"),
    (
        "train task=pg19 parallel=ddp parallel.devices=2",
        "recipe.batch_size=5: must be a multiple of 2: devices, 2, x parallel.accumulate=1; try 4 or 6",
    ),
    ("train parallel=fsdp2 optimizer=adafactor", "optimizer=adafactor: parallel=fsdp2 takes adamw or muon"),
    ("train logger.project=x", "logger.project='x': no such key of logger"),
    ("eval checkpoint=no", "checkpoint='no': neither a folder nor a run id"),
    ("eval task=passkey", "checkpoint=null: no trained model for task=passkey"),
    ("eval results_dir=/proc/no", "checkpoint=null: no trained model"),
    ("eval checkpoint={0}", "checkpoint='{0}': has no config.json: not a checkpoint"),
    ("eval checkpoint={1} task.data_dir={0}/no", "task.data_dir='{0}/no': {0}/no/test does not exist"),
    ("generate prompt=a checkpoint=no", "checkpoint='no': neither a folder nor a run id"),
    ("generate prompt=@{0}/no", "prompt='@{0}/no': cannot be read"),
    ("generate prompt=a checkpoint={0}", "checkpoint='{0}': has no config.json"),
    ("summarize {0}/no.txt", "'{0}/no.txt': cannot be read"),
    ("summarize {1}/config.json checkpoint=no", "checkpoint='no': neither a folder nor a run id"),
    ("reproduce report=table2_lm task.data_dir={0}/no", "task.data_dir='{0}/no': {0}/no/train does not exist"),
    ("reproduce report=table3_passkey results_dir=/proc/no", "results_dir='/proc/no': cannot be written"),
    ("inject base={0}/no out={0}/out", "base='{0}/no': no such folder"),
    ("inject base={0}", "out=null: name the folder to write"),
]
"""Command lines and what they are answered; {0} is an empty folder, {1} the folder of a model."""
NO_GPU = "parallel.accelerator='gpu': no GPU found; use auto or cpu"
if not has_gpu():
    verbs_of_a_device = ("train", "eval", "demo", "bench", "generate prompt=a")
    REFUSED += [(f"{words} parallel.accelerator=gpu", NO_GPU) for words in verbs_of_a_device]


def test_what_is_wrong_is_said_before_anything_slow_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes three seconds of the processor, Lightning twelve more. One process answers all lines."""
    # Other tests leave data sets of a hub in the cache that they share.
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    empty, model = tmp_path / "empty", tmp_path / "model"
    empty.mkdir()
    model.mkdir()
    description = {"run_id": "r", "model": {"name": "local"}, "dims": {}, "vocab_size": 3, "weights_sha256": ""}
    whole = description | {"description_sha256": checksum(description)}
    (model / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    lines = [line.format(empty, model).split() for line, _ in REFUSED]
    code = f"""
import contextlib, io, json, sys
from infini.cli.main import main

def answer(words):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    return code, said.getvalue(), sorted(set({HEAVY!r}) & set(sys.modules))

print(json.dumps([answer(words) for words in {lines!r}]))
"""
    answers = json.loads(python(code, empty))
    for (line, said), (status, error, imported) in zip(REFUSED, answers, strict=True):
        assert error.startswith(f"infini: error: {said.format(empty, model)}"), f"{line}: {error}"
        assert (status, imported) == (2, []), line


def test_a_training_says_what_it_is_before_anything_slow_is_imported(tmp_path: Path) -> None:
    write_corpus(tmp_path / "books")
    code = f"""
import sys
from infini.config.compose import compose
from infini.runs import preflight
for more in ([], ["recipe.steps=1"]):
    words = ["task=pg19", "task.data_dir={tmp_path}/books", "results_dir={tmp_path}/results", *more]
    preflight.begin_training(compose(words), words)
assert not set({HEAVY!r}) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    line, other = done.stderr.splitlines()
    begin = "training model=infini_linear task=pg19 scale=laptop seed=1: "
    assert line.startswith(begin) and f"; data {tmp_path}/books; results in {tmp_path}/results; published " in line
    took = r"; published trainings of this recipe took \d+ minutes? on .*; the time here is shown below"
    assert re.search(f"{took}$", line)
    assert "1,200 steps of 1,920 tokens on the " in line
    assert re.search(r"; [\d,]{7,} parameters if the vocabulary is as large as the published one; data ", line)
    # The preparations of a short training take longer than its steps.
    assert other.endswith(f"results in {tmp_path}/results")
    assert verbs()["train"].preflight == "infini.runs.preflight:begin_training"


def test_the_first_line_of_a_training_does_not_wait_for_torch(tmp_path: Path) -> None:
    """The command ends here where torch would be imported, and has printed the line by then."""
    write_corpus(tmp_path / "books")
    words = ["train", "task=pg19", f"task.data_dir={tmp_path}/books", f"results_dir={tmp_path}", *TINY]
    code = f"""
import os, sys
from infini.cli.main import main

class EndAtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os._exit(3)

sys.meta_path.insert(0, EndAtTorch())
main({words!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(r"training model=infini_linear task=pg19 scale=laptop seed=1: [\d,]+ steps of", line)
    assert " tokens on the CPU; the number of parameters follows; " in line


@pytest.mark.parametrize(
    ("words", "there", "said"),
    [
        ([], False, "the CPU"),
        ([], True, "the GPU if torch finds one, otherwise the CPU"),
        (["parallel=ddp"], True, "GPUs if torch finds one, otherwise the CPU"),
        (["parallel.accelerator=cpu"], True, "the CPU"),
        (["parallel.accelerator=gpu"], True, "the GPU"),
    ],
)
def test_the_first_line_of_a_training_names_its_device(
    words: list[str], there: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infini.runs.preflight.may_have_gpu", lambda: there)
    # Reading published records takes seconds.
    monkeypatch.setattr("infini.runs.preflight._published", lambda cfg: [])
    assert f" tokens on {said}; " in describe_training(compose(["task=passkey", *words]), words)


def test_the_line_before_a_training_names_the_base_and_what_is_trained() -> None:
    words = ["task=pg19", "model=llm", "model.train=lora", "task.data_dir=synthetic"]
    line = describe_training(compose(words), words)
    assert " steps of 245,760 tokens on " in line
    for segment, tokens in (("experiment=llm_find_keys", "2,048"), ("dims.segment_length=128", "5,120")):
        # Both are also the usual length of models from scratch.
        words = ["task=passkey", "model=llm", segment]
        assert f" steps of {tokens} tokens on " in describe_training(compose(words), words)
    assert line.startswith("training model=llm model.base=smollm2 model.memory=infini model.train=lora task=pg19 ")
