"""What all tests share: few threads, a cache of their own, no data folder and no network."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when the hub's libraries are imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"

PROJECT_ROOT = Path(__file__).resolve().parent.parent


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
        yield


@pytest.fixture
def project_root() -> Path:
    """The checkout the tests belong to."""
    return PROJECT_ROOT
