"""The files of a data set in a folder, found by their names alone: a missing one is an error before slow imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infini.errors import InputError, first_line
from infini.system.paths import is_file, is_folder

TEXT_LAYOUT = "{train,validation,test}/*.txt or *.tex, one UTF-8 file a document"
BOOK_LAYOUT = (
    "{train,validation,test}.jsonl, one JSON object a book with bid, title, summary (a list of {text}), and its text "
    "in `text`, or in `book` the path of a UTF-8 file, relative to the parent folder"
)
_SUFFIXES = (".txt", ".tex")


def text_files(data_dir: Path, split: str, setting: str) -> list[Path]:
    """The documents of a split of running text, by name.

    setting: the key and value that name the folder, for messages. Raises InputError where there are none.
    """
    folder = data_dir / split
    found = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES] if is_folder(folder) else []
    if not found:
        problem = "holds no .txt or .tex file" if is_folder(folder) else "does not exist"
        raise InputError(f"{setting}: {folder} {problem}; the layout is {data_dir}/{TEXT_LAYOUT}")
    return sorted(found, key=lambda path: path.name)


def book_file(data_dir: Path, split: str, setting: str) -> Path:
    """The file of a split of books with summaries. setting: see text_files. Raises InputError where there is none."""
    path = data_dir / f"{split}.jsonl"
    if not is_file(path):
        raise InputError(f"{setting}: {path} does not exist; the layout is {data_dir}/{BOOK_LAYOUT}")
    return path


def no_data(name: str, layout: str, hub_id: str, error: Exception, among: Sequence[str] = ()) -> InputError:
    """The error where neither folder nor hub can be read. among: corpora; any one suffices."""
    if among:
        folders = ", ".join(f"{corpus}/" for corpus in among)
        where = f"INFINI_DATA_DIR or task.data_dir to a folder that holds at least one of {folders}, each as {layout}"
    else:
        where = f"INFINI_DATA_DIR to a folder that holds {name}/{layout}, or task.data_dir to such a folder {name}"
    # Of an OSError the kind is enough: there is no network, or no such data set. All else is about the data set.
    kind = type(error).__name__
    reason = kind if isinstance(error, OSError) else f"{kind}: {first_line(error)}"
    return InputError(
        f"no data for {name}: set {where}, connect to a network for {hub_id} of the Hugging Face hub "
        f"({reason}), or try it out with task.data_dir=synthetic"
    )
