"""`make docs` builds a site whose links hold, and which fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = """\
# A table

| Model | Source | 32K, short | 1M |
| --- | ---: | ---: | ---: |
| Linear | paper | 97 | 96 |
| Linear | published | 100 | — |
| Linear, plain | published | 50 | 40 |

| Model | Seeds | 1M |
| --- | ---: | ---: |
| Linear | 1 | 2 |
| Linear, plain | 1 | — |

## Runs behind the cells

- Linear, Source (published): [`a`](../runs/a.json)
- Linear, 32K, short (published): [`b`](../runs/b.json)
- Linear, plain, 1M (published): [`c`](../runs/c.json)
- Linear, Seeds, 1M (published): [`d`](../runs/d.json)
"""


@pytest.fixture(scope="module")
def build_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cell_leads_to_the_line_of_its_runs(build_site: ModuleType) -> None:
    made = build_site.with_linked_cells(TABLE)
    assert "| Linear | paper | 97 | 96 |" in made
    assert "| Linear | [published](#runs-2) | [100](#runs-3) | — |" in made
    assert "| Linear, plain | published | 50 | [40](#runs-4) |" in made
    assert "| Linear | [1](#runs-5) | [2](#runs-5) |" in made and "| Linear, plain | 1 | — |" in made
    assert '- <a id="runs-4"></a>Linear, plain, 1M (published): [`c`](../runs/c.json)' in made
    assert re.sub(r'<a id="[\w-]+"></a>', "", re.sub(r"\[([^]`]+)\]\(#[\w-]+\)", r"\1", made)) == TABLE


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "tables").glob("*.md")), ids=lambda path: path.stem)
def test_every_line_of_runs_has_a_cell(build_site: ModuleType, path: Path) -> None:
    made = build_site.with_linked_cells(path.read_text(encoding="utf-8"))
    assert set(re.findall(r'id="(runs-\d+)"', made)) == set(re.findall(r"\(#(runs-\d+)\)", made))


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= named
    kinds = [next(iter(entry)) for entry in yaml.safe_load(text)["nav"]]
    assert kinds == ["Home", "Tutorials", "How to", "Results", "Reference", "Explanation"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_is_built_and_its_links_hold(tmp_path: Path) -> None:
    """--strict: a link to a page or a file that does not exist stops it."""
    pytest.importorskip("mkdocs")
    subprocess.run([sys.executable, ROOT / "docs" / "build_site.py"], check=True, timeout=120)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > 30
    for path, text in pages.items():
        ids = set(re.findall(r'id="([^"]+)"', text))
        anchors = set(re.findall(r'href="#([^"]+)"', text))
        assert {anchor for anchor in anchors if anchor.startswith("runs-")} <= ids, path
        for tag in re.findall(r"<(?:script|link|img|source|iframe)[^>]*>", text):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path, tag)
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text(encoding="utf-8")), path
    table = (tmp_path / "results" / "tables" / "table3_passkey_laptop.html").read_text(encoding="utf-8")
    assert 'href="#runs-' in table and (tmp_path / "results" / "runs").is_dir()
    assert "InfiniAttention" in (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
