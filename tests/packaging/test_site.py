"""`make docs` builds a site whose links hold, and which fetches nothing from elsewhere."""

from __future__ import annotations

import http.server
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from infini.runs.figure import every_report

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

| Model | 1M | Speed |
| --- | ---: | ---: |
| Linear, plain | 40 | 7 |

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
    # A cell that a table above has already: its line stands once.
    assert "| Linear, plain | [40](#runs-4) | 7 |" in made
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


def test_every_published_figure_is_shown_and_every_figure_shown_exists(build_site: ModuleType, tmp_path: Path) -> None:
    """Each on the page of its table, or of costs; the rule of what is published is that of the reports."""
    build_site.main(tmp_path)
    shown: dict[Path, set[Path]] = {}
    for page in tmp_path.rglob("*.md"):
        links = re.findall(r"\]\(([^)#]+\.(?:png|svg))\)", page.read_text(encoding="utf-8"))
        shown[page] = {(page.parent / link).resolve() for link in links}
    assert [path for paths in shown.values() for path in paths if not path.is_file()] == []
    published = {path.name for path in (ROOT / "results" / "figures").iterdir()}
    tables = {path.name for page, paths in shown.items() if page.parent.name == "tables" for path in paths}
    costs = {"source_costs_laptop.png", "training_memory_laptop.png"}
    assert published == tables | costs == {path.name for path in shown[tmp_path / "results" / "figures.md"]}
    assert "table3_passkey_laptop_accuracy_by_length.png" in {path.name for path in shown[tmp_path / "index.md"]}


def test_published_figures_are_those_that_reports_declare() -> None:
    benches = {"layer_laptop", "llm_generate_laptop", "source_costs_laptop", "training_memory_laptop"}
    declared = {
        f"{part.name}_laptop_{kind}"
        for report in every_report([])
        for part in report.parts
        for kind in report.figure_kinds
        if kind in (report.published_figures or ())
    }
    assert all(report.published_figures is not None for report in every_report([]))
    published = {path.stem for path in (ROOT / "results" / "figures").iterdir()}
    # A task of a report may have no runs.
    assert published - benches <= declared and benches <= published and len(published) <= 50


def test_every_table_is_under_a_heading_and_the_paper_s_come_first(build_site: ModuleType) -> None:
    tables = [*(ROOT / "results" / "tables").glob("*.md")]
    groups = build_site.grouped(tables)
    assert sorted(path for paths in groups.values() for path in paths) == sorted(tables) and all(groups.values())
    assert [path.stem for path in next(iter(groups.values()))][:2] == ["table1_memory_laptop", "table1_memory_paper"]
    with pytest.raises(ValueError, match=r"new_laptop\.md: no pattern of GROUPS"):
        build_site.grouped([Path("new_laptop.md")])


def test_a_figure_belongs_to_the_table_of_its_report(build_site: ModuleType) -> None:
    found = build_site.figures_by_table(["table2_lm_laptop", "table2_whole_laptop"])
    assert "table2_lm_arxiv_math_laptop_training" in found["table2_lm_laptop"]
    assert "source_costs_laptop" in found[""] and "table3_passkey_laptop_accuracy" in found[""]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. --strict: a link to a page or a file that does not exist stops it."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "docs" / "build_site.py"], check=True, timeout=120)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_texts_of_the_drawing_stay_in_their_boxes() -> None:
    """The font is DejaVu Sans, which is wider than Helvetica and Arial, and which Linux takes in their place."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    drawing = ElementTree.parse(ROOT / "docs" / "images" / "idea.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    (box,) = (group for group in drawing.iter(f"{name}g") if group.get("transform"))
    (shift,) = re.findall(r"^translate\((\d+) ", box.attrib["transform"])
    inside = list(box.iter(f"{name}text"))
    ends = {}
    for text in drawing.iter(f"{name}text"):
        font = FontProperties(family="DejaVu Sans", weight=text.get("font-weight", "normal"))
        size = float(text.get("font-size", drawing.attrib["font-size"]))
        ends[text] = float(text.attrib["x"]) + TextPath((0, 0), text.text, size, prop=font).get_extents().width
    width = float(box.find(f"{name}rect").attrib["width"])  # type: ignore[union-attr]
    assert len(inside) == 6 and max(ends[text] for text in inside) < width - 10
    assert max(end for text, end in ends.items() if text not in inside) < float(shift) - 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_is_built_and_its_links_hold(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, text in pages.items():
        ids = set(re.findall(r'id="([^"]+)"', text))
        anchors = set(re.findall(r'href="#([^"]+)"', text))
        assert {anchor for anchor in anchors if anchor.startswith("runs-")} <= ids, path
        for tag in re.findall(r"<(?:script|link|img|source|iframe)[^>]*>", text):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path, tag)
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text(encoding="utf-8")), path
    table = (site / "results" / "tables" / "table3_passkey_laptop.html").read_text(encoding="utf-8")
    assert 'href="#runs-' in table and (site / "results" / "runs").is_dir()
    assert "InfiniAttention" in (site / "reference" / "api.html").read_text(encoding="utf-8")


PROBE = Path(__file__).parent / "site_probe.html"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1400,1000"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pages_fit_their_windows_and_tables_sort(site: Path, tmp_path: Path) -> None:
    """Chromium shows every page, light and dark, 1280 and 390 pixels wide. The probe posts its findings."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here (Debian, Ubuntu: apt-get install chromium)")
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the tests' screen."""

    pages = sorted(str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html") if path.stem != "404")
    assert {"index", "how-to/llm", "results/tables/table2_lm_laptop"} < set(pages)
    shutil.copy(PROBE, site / PROBE.name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        asked = f"{address}{PROBE.name}?{','.join(pages)}"
        with (tmp_path / "log").open("w") as log:
            profile = f"--user-data-dir={tmp_path / 'profile'}"
            # A tab of its own keeps the browser open.
            running = subprocess.Popen(
                [browser, *FLAGS, profile, "--remote-debugging-port=0", asked], stdout=log, stderr=log
            )
            try:
                made = found.get(timeout=600)
            finally:
                running.terminate()
                running.wait(timeout=30)
                server.shutdown()
    assert len(made["pages"]) == len(pages) * 4
    for page in made["pages"]:
        seen = f"{page['page']}, {page['mode']}, {page['width']} wide"
        assert page["status"] == 200, seen
        assert page["scrollWidth"] <= page["width"], f"{seen}: {page['scrollWidth']} pixels, by {page['widest']}"
        assert page["theme"] == page["mode"], seen
        assert page["errors"] == [] and page["broken"] == [], seen
        assert all(name.startswith(address) for name in page["requests"]), (seen, page["requests"])
    assert made["sorted"]["given"] != made["sorted"]["up"] == sorted(made["sorted"]["given"])
    assert made["sorted"]["down"] == made["sorted"]["up"][::-1]
    assert made["sorted"]["clicked"] == made["sorted"]["up"]
    assert 0 < made["searched"]["shown"] < made["searched"]["rows"]
    assert made["switched"] == ["light", "dark"]
