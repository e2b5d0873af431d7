"""Gathers the pages of the site in build/site_docs: docs/, README, published tables, claims, figures and log.

`make docs` runs it, then MkDocs. Nothing here is imported by infini.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "site_docs"
RUNS = "## Runs behind the cells"
GROUPS = {
    "The paper's tables and figures": (
        *("table1_memory", "table2_lm", "table2_100k", "table3_passkey", "table4_booksum", "booksum_lengths"),
    ),
    "Language modelling, asked further": (*("table2_*", "memory_sizes", "segment_lengths", "drawn_segments", "lm_*"),),
    "Passkey, asked further": ("passkey_*",),
    "Pretrained language models": ("llm_*", "long_context"),
    "Seconds": ("layer",),
    "Searches for settings": ("*_search", "*_rates", "rmt_sweep"),
}
"""Heading -> patterns of names of reports, in order. A table belongs to the first that fits."""


def main(target: Path = TARGET) -> None:
    """Write all pages anew."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.py", "__pycache__", "theme"))
    results = target / "results"
    (results / "tables").mkdir(parents=True)
    for page in target.rglob("*.md"):
        page.write_text(with_anchors(_from_docs(page.read_text("utf-8"))), "utf-8")
    (target / "index.md").write_text(_from_root((ROOT / "README.md").read_text("utf-8")), "utf-8")
    (target / "contributing.md").write_text(_from_root((ROOT / "CONTRIBUTING.md").read_text("utf-8")), "utf-8")
    shutil.copy(ROOT / "CITATION.cff", target / "CITATION.cff")
    for name in ("CLAIMS.md", "LOG.md"):
        (results / name).write_text(with_anchors((ROOT / "results" / name).read_text("utf-8")), "utf-8")
    shutil.copytree(ROOT / "results" / "runs", results / "runs", ignore=shutil.ignore_patterns("*.jsonl"))
    shutil.copytree(ROOT / "results" / "figures", results / "figures")
    tables = [path for paths in grouped((ROOT / "results" / "tables").glob("*.md")).values() for path in paths]
    figures = figures_by_table([path.stem for path in tables])
    for path in tables:
        text = with_figures(with_linked_cells(path.read_text("utf-8")), path.stem, figures.get(path.stem, []))
        (results / "tables" / path.name).write_text(text, "utf-8")
    (results / "index.md").write_text(_list_of_tables(tables), "utf-8")
    (results / "figures.md").write_text(_page_of_figures(tables, figures), "utf-8")


def _from_docs(text: str) -> str:
    """A page of docs/ as one of the site, where results/ is within docs/."""
    return text.replace("](../results/", "](results/").replace("](../../results/", "](../results/")


def _from_root(text: str) -> str:
    """A page of the root folder as one of the site: docs/ is the site itself."""
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
    return text.replace("](README.md", "](index.md")


def with_anchors(text: str) -> str:
    """Headings that begin with a digit get an id that begins with a letter: the theme's script fails on others."""
    numbers = itertools.count(1)
    return re.sub(r"^(#{2,} \d.*)$", lambda found: f"{found[1]} {{ #part-{next(numbers)} }}", text, flags=re.MULTILINE)


def with_linked_cells(text: str) -> str:
    """A published table in which each cell that has runs leads to their line below.

    The lines below stand in the order of the tables and of their rows; one that a later table would repeat stands once.
    A line names a row and then its columns.
    """
    above, marker, below = text.partition(RUNS)
    if not marker:
        return text
    lines = below.splitlines()
    waiting: list[tuple[str, str, str]] = []
    for number, line in enumerate(lines):
        if found := re.match(r"- (.+?) \((published|yours)\): ", line):
            waiting.append((found[1], found[2], f"runs-{number}"))
            lines[number] = f'- <a id="runs-{number}"></a>{line[2:]}'
    passed: list[tuple[str, str, str]] = []
    made, header = [], list[str]()
    for line in above.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if not cells:
            header = header if line.startswith("|") else []
        elif not header:
            header = cells
        elif not set(line) <= set("|-: "):
            line = "| " + " | ".join(_linked(dict(zip(header, cells, strict=True)), cells, waiting, passed)) + " |"
        made.append(line)
    return "\n".join([*made, marker + lines[0], *lines[1:], ""])


def _linked(
    row: dict[str, str],
    cells: list[str],
    waiting: list[tuple[str, str, str]],
    passed: list[tuple[str, str, str]],
) -> list[str]:
    """The cells of a row, with links to the lines that are next and about it, which go from `waiting` to `passed`, and
    otherwise to lines of tables above that are about the same cells."""
    anchors: dict[str, str] = {}
    earlier = [*passed]
    while waiting and (columns := _columns_of(waiting[0], row, cells[0], anchors)):
        anchors |= dict.fromkeys(columns, waiting[0][2])
        passed.append(waiting.pop(0))
    for line in earlier:
        anchors |= dict.fromkeys(_columns_of(line, row, cells[0], anchors), line[2])
    return [cells[0]] + [
        f"[{cell}](#{anchors[column]})" if column in anchors else cell
        for column, cell in zip(list(row)[1:], cells[1:], strict=True)
    ]


def _columns_of(line: tuple[str, str, str], row: dict[str, str], title: str, linked: dict[str, str]) -> list[str]:
    """The columns of a row that a line of runs is about; none if it is about another row, or about linked cells."""
    name, source, _ = line
    about = f"{name.removeprefix(title)}," if name.startswith(f"{title}, ") else ""
    columns = [column for column in row if f", {column}," in about and column not in linked]
    # A dash has no runs, and a row of the paper's numbers has none of ours.
    if len(", ".join(columns)) + 3 != len(about) or row.get("Source", source) != source:
        return []
    return [] if all(row[column] == "—" for column in columns) else columns


def grouped(tables: Iterable[Path]) -> dict[str, list[Path]]:
    """Heading -> tables, in the order of GROUPS and of their patterns. Raises ValueError for a table of no group."""
    by_place: dict[tuple[str, int], list[Path]] = {
        (heading, place): [] for heading, patterns in GROUPS.items() for place in range(len(patterns))
    }
    for path in sorted(tables):
        report = path.stem.rpartition("_")[0]
        fits = [key for key in by_place if fnmatch(report, GROUPS[key[0]][key[1]])]
        if not fits:
            raise ValueError(f"{path.name}: no pattern of GROUPS in docs/build_site.py fits {report}")
        by_place[fits[0]].append(path)
    return {
        heading: [path for (of, _), paths in by_place.items() if of == heading for path in paths] for heading in GROUPS
    }


def _title(path: Path) -> str:
    return path.read_text("utf-8").splitlines()[0].lstrip("# ")


def _list_of_tables(tables: list[Path]) -> str:
    lines = [
        "# Tables",
        "",
        "Each cell leads to the runs behind it. A run is a JSON file with its command and configuration.",
    ]
    for heading, paths in grouped(tables).items():
        lines += ["", f"## {heading}", "", *(f"- [{_title(path)}](tables/{path.name})" for path in paths)]
    return "\n".join(
        [*lines, "", "[Verdicts on the paper's claims](CLAIMS.md), [all figures](figures.md), [the log](LOG.md).", ""]
    )


def figures_by_table(tables: list[str]) -> dict[str, list[str]]:
    """Name of a table -> names of its figures. Figures of `infini bench` have no table and are below ""."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "results" / "figures").glob("*.png")):
        name = re.sub(r"_(arxiv_math|pg19)_(laptop|gpu|paper)", r"_\2", path.stem)
        # If several table names fit, the longest is meant.
        of = max((table for table in tables if name.startswith(table)), key=len, default="")
        found.setdefault(of, []).append(path.stem)
    return found


def with_figures(text: str, table: str, figures: list[str]) -> str:
    """The page of a table with its figures, above the list of runs."""
    shown = ["## Figures", "", *(_image(name, "../figures") for name in figures)] if figures else []
    above, marker, below = text.partition(RUNS)
    return above + "\n".join([*shown, ""] if shown else []) + marker + below


def _image(name: str, folder: str) -> str:
    """A figure, described by the words of its name."""
    return f"![{name.replace('_', ' ')}]({folder}/{name}.png){{ loading=lazy }}\n"


def _page_of_figures(tables: list[Path], by_table: dict[str, list[str]]) -> str:
    """A page of all figures, in the order of the tables."""
    lines = [
        "# Figures",
        "",
        "The published ones, made from the published records. `infini figure` draws these and all others.",
        "",
    ]
    for path in tables:
        if names := by_table.get(path.stem):
            lines += [f"## [{_title(path)}](tables/{path.name})", "", *(_image(name, "figures") for name in names)]
    lines += ["## Costs (`infini bench`)", "", *(_image(name, "figures") for name in by_table[""])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
