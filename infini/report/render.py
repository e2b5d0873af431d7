"""Writes the tables of a report for a terminal and as Markdown, LaTeX and CSV, all from the same cells."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infini.records import write_atomically
from infini.report.tables import DASH, PLUS_MINUS, RenderedReport
from infini.system.process import in_encoding

if TYPE_CHECKING:
    from rich.console import Console

_CSV_HEADER = (
    *("report", "scale", "table", "model", "title", "column"),
    *("text", "value", "spread", "spread_kind", "n_seeds", "origin", "source", "run_ids"),
)

NARROWEST_MODEL, NARROWEST_CELL = 24, 12
"""Minimum widths of the column of titles and of the others. In a narrow terminal, cells are wrapped at spaces down to
these widths; if that is not enough, the columns are split into several tables."""


def print_report(report: RenderedReport, console: Console, with_runs: bool = False) -> None:
    """Print the tables and notes of a report to a terminal; 120 columns are enough.

    with_runs: print the ids of the runs behind the cells, too.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table as Grid

    def shown(text: str) -> str:
        """The text in the terminal's encoding, before widths are measured, because it may become longer."""
        return in_encoding(text, console.encoding)

    console.print(f"[bold]{escape(report.title)}[/bold]")
    if report.totals:
        console.print(escape(report.totals), highlight=False)
    for table in report.tables:
        console.print()
        console.print(escape(table.title), style="italic", highlight=False)
        names = [shown(heading) for heading in table.columns]
        columns = [[shown(row.cells[index].text) for row in table.rows] for index in range(len(names))]
        room = console.width - NARROWEST_MODEL
        # Headings are wrapped at spaces, so a column is at least as wide as its longest word.
        needed = [max(map(len, (*cells, *heading.split()))) for heading, cells in zip(names, columns, strict=True)]
        if sum(2 + width for width in needed) > room:
            width = max(NARROWEST_CELL, room // len(columns) - 2)
            columns = [[_folded(text, width) for text in cells] for cells in columns]
        widths = [max([len(line) for cell in cells for line in cell.split("\n")], default=0) for cells in columns]
        headings = [_folded(heading, width) for heading, width in zip(names, widths, strict=True)]
        widths = [max(width, *map(len, heading.split("\n"))) for heading, width in zip(headings, widths, strict=True)]
        for number, block in enumerate(_blocks(widths, room)):
            if number:
                console.print()
            grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
            grid.add_column(table.rows_are)
            for index in block:
                grid.add_column(escape(headings[index]), justify="left" if table.is_prose else "right", no_wrap=True)
            for place, row in enumerate(table.rows):
                grid.add_row(escape(shown(row.title)), *(escape(columns[index][place]) for index in block))
            console.print(grid)
    console.print()
    for note in report.notes:
        console.print(escape(note), style="dim", highlight=False)
    by_row: dict[tuple[str, str], dict[str, None]] = {}
    for line in [row for table in report.tables for row in table.rows] if with_runs else ():
        for cell in line.cells:
            if cell.run_ids:
                by_row.setdefault((line.title, cell.source), {}).update(dict.fromkeys(cell.run_ids))
    if by_row:
        console.print(
            "\n[italic]Runs behind the rows (by cell: in the files); `parent` in a record is the training[/italic]"
        )
    for (title, source), run_ids in by_row.items():
        console.print(escape(f"{title} ({source}): {', '.join(run_ids)}"), style="dim", highlight=False)


def _blocks(widths: list[int], room: int) -> list[list[int]]:
    """Indices of columns of these widths, grouped into as few tables as fit into `room`."""
    blocks: list[list[int]] = []
    left = 0
    for index, width in enumerate(widths):
        if not blocks or 2 + width > left:
            blocks.append([])
            left = room
        blocks[-1].append(index)
        left -= 2 + width
    return blocks


def _folded(text: str, width: int) -> str:
    """A text wrapped at spaces into lines of at most `width` characters, or the length of its longest word."""
    return "\n".join(textwrap.wrap(text, width=max([1, width, *map(len, text.split())])))


def to_markdown(report: RenderedReport, links: Mapping[str, str] | None = None) -> str:
    """The report as Markdown: title, totals, tables and notes. The run ids behind the measured cells follow at the end.

    Args:
        report: the report.
        links: source (`published` or `yours`) -> folder of its records, relative to the folder of the text. Run ids of
            these sources become links to their records.
    """

    def line(*cells: str) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [f"# {_markdown(report.title)}", ""]
    if report.totals:
        lines += [_markdown(report.totals), ""]
    for table in report.tables:
        lines += [f"**{_markdown(table.title)}**", ""]
        lines.append(line(table.rows_are, *map(_markdown, table.columns)))
        lines.append(line("---", *["---" if table.is_prose else "---:"] * len(table.columns)))
        lines += [line(*map(_markdown, (row.title, *(cell.text for cell in row.cells)))) for row in table.rows]
        lines.append("")
    lines += [f"- {_markdown(note)}" for note in report.notes]
    if behind := behind_cells(report):
        lines += ["", "## Runs behind the cells", ""]
    for where, source, run_ids in behind:
        folder = (links or {}).get(source)
        shown = [f"[`{run_id}`]({folder}/{run_id}.json)" if folder else f"`{run_id}`" for run_id in run_ids]
        lines.append(f"- {_markdown(where)} ({source}): {', '.join(shown)}")
    return "\n".join(lines) + "\n"


def behind_cells(report: RenderedReport) -> list[tuple[str, str, tuple[str, ...]]]:
    """(row and columns, source, run ids) for each set of runs behind the cells of a row.

    Tables may repeat cells; what is the same is listed once.
    """
    found: dict[tuple[str, str, tuple[str, ...]], None] = {}
    for table in report.tables:
        for row in table.rows:
            columns: dict[tuple[str, tuple[str, ...]], list[str]] = {}
            for column, cell in zip(table.columns, row.cells, strict=True):
                if cell.run_ids:
                    columns.setdefault((cell.source, cell.run_ids), []).append(column)
            found |= {(f"{row.title}, {', '.join(names)}", *behind): None for behind, names in columns.items()}
    return list(found)


def _markdown(text: str) -> str:
    """Escape what Markdown would read as markup. Text between backquotes stays code unless it has a "|"."""
    parts = re.split(r"(`[^`|]+`)", text)
    return "".join(part if at % 2 else _MARKUP.sub(r"\\\g<0>", part) for at, part in enumerate(parts))


# An underscore inside a word is a letter, and brackets are a link only before one of "([:".
_MARKUP = re.compile(r"[\\|*`]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|\](?=[(\[:])|<(?=[A-Za-z/!?])")


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    DASH: "---",
    PLUS_MINUS: r"$\pm$",
    **{mark: f"\\{mark}" for mark in "&%$#_"},
}


def latex_escape(text: str) -> str:
    """`text` with LaTeX's special characters escaped, and a minus sign before negative numbers."""
    escaped = "".join(_LATEX_ESCAPES.get(character, character) for character in text)
    return re.sub(r"^-(?=\d)", "$-$", escaped)


def to_latex(report: RenderedReport) -> str:
    """The report as LaTeX tables for the booktabs package. Run ids follow as comments."""
    lines = [f"% {report.title}; needs \\usepackage{{booktabs}}".replace("\n", " ")]
    for index, table in enumerate(report.tables):
        caption = f"{report.title}. {table.title}."
        if index == 0:
            caption += " " + " ".join(note if note.endswith(".") else f"{note}." for note in report.notes)
        lines += [
            r"\begin{table}",
            r"  \centering\small",
            rf"  \begin{{tabular}}{{l{'r' * len(table.columns)}}}",
            r"    \toprule",
            "    " + " & ".join([table.rows_are, *map(latex_escape, table.columns)]) + r" \\",
            r"    \midrule",
        ]
        for row in table.rows:
            cells = [latex_escape(row.title), *(latex_escape(cell.text) for cell in row.cells)]
            lines.append("    " + " & ".join(cells) + r" \\")
        lines += [
            r"    \bottomrule",
            r"  \end{tabular}",
            rf"  \caption{{{latex_escape(caption)}}}",
            r"\end{table}",
        ]
        for row in table.rows:
            for run_id in dict.fromkeys(run_id for cell in row.cells for run_id in cell.run_ids):
                lines.append(f"% {row.title}: {run_id}")
    return "\n".join(lines) + "\n"


def to_csv(report: RenderedReport) -> str:
    """The report as CSV, one line for each cell, with unrounded numbers, origin and run ids (separated by spaces)."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    for index, table in enumerate(report.tables):
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                place = [report.name, report.scale, index + 1, row.model, row.title, column]
                text = "" if cell.origin == "missing" else cell.text
                numbers = ["" if number is None else repr(number) for number in (cell.value, cell.spread)]
                kinds = (cell.spread_kind, cell.n_seeds, cell.origin, cell.source)
                writer.writerow([*place, text, *numbers, *kinds, " ".join(cell.run_ids)])
    return stream.getvalue()


def write_report(report: RenderedReport, folder: Path, links: Mapping[str, str] | None = None) -> list[Path]:
    """Write `<report>_<scale>.{md,tex,csv}` into `folder`, each atomically, and return their paths."""
    texts = {"md": to_markdown(report, links), "tex": to_latex(report), "csv": to_csv(report)}
    paths = {suffix: folder / f"{report.stem}.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        write_atomically(paths[suffix], text.encode())
    return list(paths.values())
