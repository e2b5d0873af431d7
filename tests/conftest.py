"""The settings of all tests: few threads, a cache of their own, no data folder and no network."""

import gc
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_runner import Runner
from tiny_runs import TINY, write_corpus

from infini.cli import main as cli

# Read when the hub's libraries are imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"

# A command composes its configuration of about 25 files, and hundreds of tests run commands: this parser is faster.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

PROJECT_ROOT = Path(__file__).resolve().parent.parent


_frozen_for: list[Path] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each file of tests starts with a garbage collector that does not look at what is there already; tests marked
    `gpu` are skipped where there is none.

    What is there is what earlier files imported, most of it libraries that live until the end. Every run of a command
    collects garbage, to measure its peak of memory, and took 60 ms for it.
    """
    if [item.path] != _frozen_for:
        _frozen_for[:] = [item.path]
        gc.collect()
        gc.freeze()
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Tests are small: a second thread costs more than it brings."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def environment_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the session, and no data folder, whatever the user's shell exports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFINI_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("INFINI_DATA_DIR", raising=False)
        # Lightning sets the number of threads by the processor's cores where this is not set.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb itself, offline and silent, with nobody logged in; skipped where it is not installed."""
    pytest.importorskip("wandb")
    for name, value in (("HOME", str(tmp_path)), ("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def project_root() -> Path:
    """The checkout the tests belong to."""
    return PROJECT_ROOT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few pages of made-up words, laid out as books are."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def few_words() -> Iterator[None]:
    """RULER's generator makes millions of pairs of words when it is imported, which takes ten seconds."""
    import wonderwords

    words = wonderwords.RandomWord()._categories
    few = SimpleNamespace(_categories={kind: words[kind][:40] for kind in ("nouns", "adjectives", "verbs")})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wonderwords, "RandomWord", lambda: few)
        yield
    # Others import it with all its words.
    for name in ("prepare_niah", "niah_utils"):
        sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the checkout, whose published results are not these tests' business."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("infini.records.published_dir", lambda: tmp_path / "published")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second between runs: several of these end within one, which is how finely records tell their times."""
    minutes = itertools.count()
    monkeypatch.setattr("infini.records.utc_now", lambda: f"2100-01-01T00:{next(minutes):02d}:00Z")


@pytest.fixture
def infini(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(corpus, tmp_path / "results", capfd)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one training, made once; tests work on a copy."""
    results = tmp_path_factory.mktemp("trained")
    assert cli.main(["train", *TINY, "logger=none", f"task.data_dir={corpus}", f"results_dir={results}"]) == 0
    return results


@pytest.fixture
def with_model(infini: Runner, trained: Path) -> Runner:
    shutil.copytree(trained, infini.results)
    return infini
