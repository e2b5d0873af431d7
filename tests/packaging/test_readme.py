"""Promises of README and docs, which must hold as written."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from infini.cli import main as cli
from infini.cli.arguments import bracketed, check_lengths, refuse_unread
from infini.commands import Arguments, verbs
from infini.config.compose import compose, expand_sweep
from infini.config.lengths import parse_lengths
from infini.records import load_records
from infini.report.load import load_report
from infini.report.passkey import PasskeyReport, chosen_cells
from infini.report.selection import select_runs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN_ELSEWHERE = {"bad_input.md": "tests/cli/test_bad_input.py", "extending.md": "test_extending, test_new_task, ..."}
"""Pages whose commands other tests run as they stand: they need files that the page adds."""


def words_of_infini(line: str) -> str | None:
    """The words for infini of a line of a shell, which may start infini by torchrun or by sbatch --wrap."""
    by_sbatch = re.fullmatch(r"sbatch .*?--wrap (['\"])infini (.*)\1", line)
    started = re.fullmatch(r"(?:(?:srun )?torchrun .*? -m )?infini (.*?)(?: &)?", line)
    return by_sbatch[2] if by_sbatch else started and started[1]


def commands_of(text: str) -> set[str]:
    """Commands of infini in backticks, and lines of blocks that start it."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", plain)]
    return {words for line in lines if (words := words_of_infini(line)) is not None}


def made_by_make(text: str) -> set[str]:
    """The text after `$(BIN)/infini`, up to the end of the line or of the shell's command, anywhere in a Makefile."""
    lines = re.sub(r"\\\n\s*", " ", text)
    return {" ".join(found.split()) for found in re.findall(r"\$\(BIN\)/infini ([^\n;&|<>]+)", lines)}


def shown() -> list[tuple[str, str]]:
    """(page, command) of all pages and of the Makefile."""
    pages = [page for page in PAGES if page.name not in RUN_ELSEWHERE]
    commands = {page.name: commands_of(page.read_text(encoding="utf-8")) for page in pages}
    commands["Makefile"] = made_by_make(MAKEFILE)
    return [(page, command) for page in commands for command in sorted(commands[page])]


def test_the_readme_shows_every_verb() -> None:
    assert {command.split()[0] for command in commands_of(README)} >= set(verbs())


@pytest.mark.parametrize(("page", "command"), [(page, text) for page, text in shown() if "--help" not in text])
def test_commands_are_understood(page: str, command: str) -> None:
    understand(command)


def understand(command: str) -> None:
    """Compose and check a command, given without `infini`; raises InputError where the command line would refuse it."""
    name, *words = shlex.split(command.replace("\\|", "|"))
    verb = verbs()[name]
    if name in ("table", "figure", "publish", "reproduce"):
        words = [word for word in words if word != "..."]
    refuse_unread(name, words)
    check_lengths(words)
    sweeps = "-m" in words
    words = [word if sweeps else bracketed(word) for word in words if word != "-m"]
    taken = Arguments(words) if verb.read is None else verb.read(words)
    settings = [*verb.fixed_settings, *taken.overrides]
    for job in expand_sweep(settings) if sweeps else [[*settings, *taken.first]]:
        cfg = compose(job)
        if verb.check is not None:
            verb.check(cfg, job)


def test_make_fills_the_tables_at_the_scale_of_a_gpu() -> None:
    """docs/how-to/many_devices.md says so. A wrong reading of the Makefile finds none of them."""
    words = [shlex.split(command) for command in made_by_make(MAKEFILE)]
    reports = {line[1] for line in words if line[0] == "reproduce" and "scale=gpu" in line}
    assert reports == {"report=table2_lm", "report=table3_passkey", "report=table4_booksum"}
    assert ["bench", "suite=paper", "recipe.batch_size=1"] in words


def marked_gpu(folder: Path) -> set[str]:
    """Names of the tests in a folder that are marked `gpu`: by a decorator, by a name of any module that holds the mark
    (as a list of devices for parametrize), or by the `pytestmark` of their module."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]

    def assigned(tree: ast.Module, what: re.Pattern[str]) -> set[str]:
        """Names of the module whose values contain this."""
        nodes = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [(node.targets if isinstance(node, ast.Assign) else [node.target], node) for node in nodes]
        return {ast.unparse(each) for names, node in targets if what.search(ast.unparse(node)) for each in names}

    mark = re.compile(r"\bmark\.gpu\b")
    lists = set().union(*(assigned(ast.parse(text), mark) for text in texts if mark.search(text))) - {"pytestmark"}
    marked = re.compile("|".join([mark.pattern, *(rf"\b{re.escape(name)}\b" for name in lists)]))
    found = set()
    for tree in (ast.parse(text) for text in texts if marked.search(text)):
        everything = "pytestmark" in assigned(tree, marked)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if everything or any(marked.search(ast.unparse(each)) for each in node.decorator_list):
                    found.add(node.name)
    return found


def test_the_page_names_all_tests_that_need_a_gpu() -> None:
    page = (ROOT / "docs" / "how-to" / "many_devices.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)(?:\[cuda\])?`", page.partition("\n## Not run for want of hardware\n")[2]))
    assert named == marked_gpu(ROOT / "tests")


def test_tests_that_need_a_gpu_are_found_however_they_are_marked(tmp_path: Path) -> None:
    a, b, c = (
        "from pytest import mark, param\nWHERE = [1, param(2, marks=mark.gpu)]\n",
        "import pytest\n@pytest.mark.gpu\n@other\ndef test_a(): ...\n@pytest.mark.parametrize('x', WHERE)\n"
        "def test_b(): ...\n@pytest.mark.slow\ndef test_c(): ...\n",
        "import pytest\npytestmark = [pytest.mark.slow, pytest.mark.gpu]\ndef test_d(): ...\n",
    )
    for name, text in (("a", a), ("b", b), ("c", c)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert marked_gpu(tmp_path) == {"test_a", "test_b", "test_d"}


def test_commands_of_a_makefile_are_read_wherever_they_stand() -> None:
    text = "LIST := one \\\n\ttwo\nall:\n\t@test -f a || $(BIN)/infini bench suite=paper \\\n\t\tseed=1 && touch a\n"
    text += "\t$(BIN)/infini demo; $(BIN)/python -m infini\n"
    assert made_by_make(text) == {"bench suite=paper seed=1", "demo"}


@pytest.mark.parametrize(("page", "program"), [("many_devices.md", "torchrun"), ("cluster.md", "sbatch")])
def test_commands_that_another_program_starts_are_read(page: str, program: str) -> None:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    started = [words_of_infini(line) or "" for line in text.splitlines() if line.startswith(f"{program} ")]
    assert started and {words.partition(" ")[0] for words in started} <= set(verbs())
    assert {(page, words) for words in started} <= set(shown())


def test_every_target_of_make_is_on_a_page() -> None:
    """In code, as `make env`."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = [
        span for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for span in block.splitlines()
    ]
    code += re.findall(r"`([^`\n]+)`", text)
    named = {word for span in code if span.startswith("make ") for word in span.split()[1:]}
    (phony,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    assert "env" in phony.split() and set(phony.split()) - named == set()


NO_ADDITIONS = {
    "task=booksum": "what a model was trained on",
    "model.unlimiformer=test": "of an evaluation or a summary, in a row whose command is a training",
}
"""Settings of the commands' page that are not added to a command of their row, and what they are."""


def shortened() -> list[str]:
    """The commands of docs/how-to/commands.md that begin with `...` or are settings alone, each written out: added to
    the last whole command before it in its row, or else to the first one."""
    page = (ROOT / "docs" / "how-to" / "commands.md").read_text(encoding="utf-8")
    found = []
    for row in (line for line in page.splitlines() if line.startswith("| ")):
        spans = [span for span in re.findall(r"`([^`]+)`", row) if span not in NO_ADDITIONS]
        whole = next((span for span in spans if span.startswith("infini ")), None)
        for span in spans:
            words = span.removeprefix("... ").split()
            if span.startswith("infini "):
                whole = span
            elif span.startswith("...") or all(re.match(r"[\w./]+=", word) for word in words):
                assert whole is not None, f"{span}: no command in its row"
                found.append(with_settings(whole.removeprefix("infini "), words))
    return found


def with_settings(command: str, added: list[str]) -> str:
    """A command with settings in place of those that they replace: of the same key, and of the keys of a group whose
    choice is replaced. A report replaces an experiment, which chooses its own, and the other way round."""
    keys = {word.partition("=")[0] for word in added}
    if keys & {"report", "experiment"}:
        keys |= {"report", "experiment"}
    kept = [
        word
        for word in command.split()
        if "=" not in word or not {key := word.partition("=")[0], key.partition(".")[0]} & keys
    ]
    return " ".join([*kept, *added])


@pytest.mark.parametrize("command", shortened())
def test_shortened_commands_are_understood(command: str) -> None:
    understand(command)


def test_settings_replace_those_of_the_command_that_they_are_added_to() -> None:
    command = "train logger=wandb logger.project=memory seed=1"
    assert with_settings(command, ["logger=none"]) == "train seed=1 logger=none"
    assert with_settings(command, ["logger.project=a", "seed=2"]) == "train logger=wandb logger.project=a seed=2"
    assert with_settings("reproduce experiment=a", ["report=b"]) == "reproduce report=b"
    assert len(shortened()) > 20


def test_help_is_shown_for_verbs_that_exist() -> None:
    helped = {text.split()[0] for _, text in shown() if "--help" in text}
    assert helped - {"--help"} <= set(verbs())


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 160


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_files_that_pages_name_exist() -> None:
    """`results/...`, `docs/...`, `tests/...` in backticks."""
    for page in PAGES:
        for path in re.findall(
            r"`((?:results|docs|tests|conf|infini)/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8")
        ):
            made_there = page.name in RUN_ELSEWHERE
            assert made_there or (ROOT / path).is_file(), f"{page.name}: {path}"


def test_tests_that_pages_name_exist() -> None:
    """`test_x.py` and `test_x.py::test_y`, anywhere on a page. Those of results/LOG.md are of their time."""
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [
        f"{page.name}: {file} {test}"
        for page in PAGES
        for file, test in re.findall(r"\b(test_\w+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8"))
        if file not in there or (test and f"\ndef {test}(" not in there[file])
    ]
    assert missing == []


def test_folders_of_tests_are_those_of_the_package_or_named_in_the_layout() -> None:
    packages = {path.parent.name for folder in ("infini", ".") for path in (ROOT / folder).glob("*/__init__.py")}
    tests = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/*.py")}
    layout = (ROOT / "docs" / "reference" / "layout.md").read_text(encoding="utf-8")
    assert tests - packages == set(re.findall(r"^tests/(\w+)/ ", layout, re.MULTILINE)) != set()


def test_the_counts_of_verdicts_are_those_of_the_claims() -> None:
    claims = (ROOT / "results" / "CLAIMS.md").read_text(encoding="utf-8")
    counts = {
        verdict: len(re.findall(rf"\| {verdict} \|", claims))
        for verdict in ("holds", "does not hold", "inconclusive", "not testable")
    }
    hold, fail, open_, untested = counts.values()
    text = " ".join(README.split())
    beyond = len(re.findall(r"\| not in the paper \|", claims))
    of_paper = f"{sum(counts.values()) - beyond} of the paper's claims"
    said = f"Of {sum(counts.values())} tests ({of_paper}, {beyond} of the same at another segment length), {hold} hold"
    assert f"{said} at this scale, {fail} do not, " in text
    assert f"{open_} are inconclusive and {untested} are not testable" in text
    holding = dict(re.findall(r"^\*\*(.*?): \d+ claims: holds (\d+)", claims, re.MULTILINE))
    by_topic = [sum(int(n) for title, n in holding.items() if word in title) for word in ("arithmetic", "modelling")]
    by_topic += [
        int(holding[title])
        for title in (
            "Passkey retrieval (Table 3 of the paper)",
            "Summaries of whole books (Table 4 of the paper)",
            "A pretrained language model with a memory, after continual pre-training (not a table of the paper)",
        )
    ]
    # Running text, too, but baselines have a sixteenth of the tokens.
    (unfair,) = (int(n) for title, n in holding.items() if "not a fair comparison" in title)
    assert sum(by_topic) + unfair == hold
    arithmetic, modelling, passkeys, summaries, llm = by_topic
    running = f"{modelling + unfair} are about running text ({unfair} that Infini-attention beats a baseline, after"
    assert f"Of the {hold}, {arithmetic} are arithmetic without a run, {running} sixteen times its tokens)" in text
    assert f"{passkeys} about passkeys, {summaries} about summaries and {llm} about the pretrained LLM." in text
    results = " ".join((ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8").split())
    said = (
        f"Of {sum(counts.values())} tests, {of_paper} and {beyond} of the same at another segment length, {hold} hold"
    )
    assert f"{said} at this scale, {fail} do not, {open_} are" in results


def row_of(table: str, *names: str) -> str:
    """The first row of a published file that begins with these cells."""
    text = (ROOT / "results" / table).read_text(encoding="utf-8").replace("\\", "")
    return next(line for line in text.splitlines() if line.startswith("| " + " | ".join(names) + " |"))


def read_table(name: str) -> list[str]:
    """The lines of a published table."""
    return (ROOT / "results" / "tables" / name).read_text(encoding="utf-8").replace("\\", "").splitlines()


TUNED_LLM = "Linear, continual pre-training, fine-tuned 400 steps (ours: adapters at 1e-3, inputs of 512 to 2K)"


def test_the_results_at_a_glance_are_those_of_the_tables() -> None:
    lines = [line for line in README.splitlines() if line.startswith("| ") and line.count("|") == 5][2:9]
    said = [re.findall(r"\d+(?:\.\d+)?", cells.split("|")[2]) for cells in lines]
    paper = [re.findall(r"\d+(?:\.\d+)?", cells.split("|")[3]) for cells in lines]
    claim = row_of("CLAIMS.md", "114x less memory than Memorizing Transformers")
    table2 = (ROOT / "results" / "tables" / "table2_lm_laptop.md").read_text(encoding="utf-8")
    sizes = r"^\| Infini-Transformer \(Linear\) \| 1\.6M \((\d+)x\) \| [\d,]+ \(([\d.]+)x\) \|"
    ((printed, built),) = re.findall(sizes, table2, re.MULTILINE)
    assert "115.7x" in claim and "holds" in claim and (said[0], paper[0]) == (["115.7"], [printed])
    assert "by Table 1's formula 42.3x" in claim
    text = " ".join(README.split())
    assert f"the formula of the paper's Table 1 gives 42.3. In our small models it is {built} times less." in text
    for index, title in ((1, "Linear, scratch, penalty on writes"), (2, "Linear, PG19, fine-tuned 400 steps")):
        for values, source in ((said, "published"), (paper, "paper")):
            million = row_of("tables/table3_passkey_laptop.md", title, source).split("|")[-2].strip(" *")
            assert "/".join(values[index][:3]) == million
    # The answers' text lies beside the records that the table names.
    behind = "- Linear, PG19, fine-tuned 400 steps, 32K, "
    (line,) = (line for line in read_table("table3_passkey_laptop.md") if line.startswith(behind))
    files = [ROOT / "results" / "runs" / f"{run}.jsonl" for run in re.findall(r"\[`([\w-]+)`\]", line)]
    answers = [[json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] for path in files]
    most = [sum(n for _, n in Counter(answer["answer"] for answer in each).most_common(3)) for each in answers]
    share = min(n / len(each) for n, each in zip(most, answers, strict=True))
    assert len(files) == 3 and f"three answers make up {math.floor(100 * share)} % or more of all that it gives" in text
    digits: dict[str, list[float]] = {"start": [], "middle": [], "end": []}
    for answer in itertools.chain(*answers):
        if answer["length"] == 2**20:
            digits[answer["depth"]].append(answer["digits_right"] / len(answer["key"]))
    right = " / ".join(f"{100 * sum(found) / len(found):.0f}" for found in digits.values())
    assert f"of the digits {right} % are right, which is chance" in text
    without = row_of("tables/table3_passkey_laptop.md", "Linear, scratch, no penalty on writes")
    found = without.split("|")[-2].strip(" *").replace("/", " / ")
    assert f"Without the penalty {found} % are found (one seed)" in text
    llm = next(
        line for line in read_table("llm_passkey_laptop.md") if ", input gate, " in line and "| published |" in line
    )
    # The claim is about 32K to 1M tokens, and not all keys of the longest texts are found.
    columns = (8, 10, 11)
    seeds = llm.split("|")[8].split()[1:]
    tokens = [llm.split("|")[column].split()[0].replace("°", "").replace("*", "").split("/") for column in columns]
    counts = keys_of_rows()["linear_input_gate"]
    whole = [str(count) for length in (2**17, 2**19, 2**20) for count in counts[length]]
    assert said[3] == [*itertools.chain(*tokens), *whole]
    assert lines[3].split("|")[1].startswith(" Passkey in 128K; 512K; 1M tokens:")
    assert "an input gate (Linear, ours)" in lines[3] and ("one seed" in lines[3]) == (seeds == ["(1)"])
    for index, column in ((4, 2), (5, 4)):
        ours = [
            row_of("tables/table2_lm_laptop.md", name)
            for name in ("Infini-Transformer (Linear)", "Memorizing Transformers")
        ]
        assert said[index] == [row.split("|")[column + 1].split()[0] for row in ours]
        assert paper[index] == [row.split("|")[column].strip() for row in ours]
    paper_llm = row_of("tables/llm_passkey_laptop.md", TUNED_LLM, "paper")
    assert paper[3] == [each for column in columns for each in paper_llm.split("|")[column].strip().split("/")]
    table4 = "tables/table4_booksum_laptop.md"
    for index, name in enumerate(("Infini-Transformers (Linear)", "PRIMERA + Unlimiformer")):
        assert f" {said[6][index]} ±" in row_of(table4, name, "published")
        assert f" {paper[6][index]} |" in row_of(table4, name, "paper")


def test_the_page_of_results_has_the_numbers_of_the_tables() -> None:
    page = (ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 120
    text = " ".join(page.split())
    for table, column, said in (
        ("segment_lengths", 2, {"local attention": "Local attention only, 16 times", "Linear": "Linear, 16 times"}),
        ("segment_lengths", 2, {"Transformer-XL": "Transformer-XL, 16 times", "RMT": "RMT, 16 times"}),
        ("table2_segments_of_128", 2, {"local attention": "Local attention only", "Linear": "Linear"}),
    ):
        values = [row_of(f"tables/{table}_laptop.md", row).split("|")[column].strip() for row in said.values()]
        shown = zip(said, values, strict=True)
        assert ", ".join(f"{name} {value.removesuffix(' (3)')}" for name, value in shown) in text
    table = "tables/llm_continual_laptop.md"
    rows = ("Segments of 512 and memory (Linear), untrained", "SmolLM2, segments of 512")
    memory, segments = (row_of(table, row).split("|")[2].strip() for row in rows)
    said = f"a perplexity of {memory} with an untrained memory and {segments} without, on books in segments of 512"
    assert said in text
    trained = ("Segments of 512 and memory (Linear), trained", "Segments of 512, trained")
    memory, segments = (row_of(table, row).split("|")[2].split()[0] for row in trained)
    assert f"it has {memory} with the memory (Linear) and {segments} without" in text


def test_the_model_on_paper_is_what_its_assumptions_give() -> None:
    page = (ROOT / "docs" / "how-to" / "many_devices.md").read_text(encoding="utf-8")
    layers, d_model, heads, size, segment, parameters = 32, 4096, 8, 128, 2048, 8e9
    operations = 8 * parameters + 16 * segment / 2 * d_model * layers
    assert f"{operations / 1e9:.0f} GFLOP" in page
    number = r"([\d.]+)"
    row = rf"^\| (\d+)M \| (\d+) \| ([\d,]+) \| {number} \| {number} \| (\d+) \| (\d+) \| (\d+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) == 5
    # By hand: 16,384 tokens x 66.15 GFLOP / 400 TFLOP/s = 2.71 s; 48 GB x 63/64 / 50 GB/s = 0.945 s; 1 + ceil(5.98) = 7
    # rounds; 96 x 7 x (10 + 1,052,672 / 50,000) us = 20.9 ms; 16,384 x 262,144 bytes + 128 GB / 64 = 6.3 GB.
    assert "| 1M | 64 | 16,384 | 2.7 | 0.9 | 7 | 21 | 6 |" in page
    for millions, gpus, *said in rows:
        ranks = int(gpus)
        own = int(millions) * 2**20 // ranks
        rounds = 1 + math.ceil(math.log2(ranks - 1))
        exchange = 3 * layers * rounds * (10e-6 + 4 * heads * size * (2 * size + 1) / 50e9)
        seconds = own * operations / 4e14
        gathered = 3 * 2 * parameters * (1 - 1 / ranks) / 50e9
        held = own * d_model * 2 * layers + 16 * parameters / ranks
        first = [f"{own:,}", f"{seconds:.1f}", f"{gathered:.1f}"]
        assert said == [*first, str(rounds), f"{exchange * 1e3:.0f}", f"{held / 1e9:.0f}"]
        if seconds < 4:
            assert 1 / 4 < gathered / seconds < 3 / 8 and 2 * gathered > seconds / 2
        assert exchange < 0.01 * seconds
    attention = 16 * 2**20 / 2 * d_model * layers
    assert f"would add {attention / operations:.0f} times" in " ".join(page.split())
    assert f"are {2 * 2 * heads * size * layers * 2**20 / 1e9:.0f} GB" in page


def test_the_bytes_of_a_boundary_are_those_of_their_formulas() -> None:
    """tests/nn/test_sequence_parallel.py measures the formulas themselves."""
    page = (ROOT / "docs" / "how-to" / "many_devices.md").read_text(encoding="utf-8")
    formulas = dict(re.findall(r"^- (Linear(?: \+ Delta)?): 4 B G K \((K \+ )?V \+ 1\) R$", page, re.MULTILINE))
    assert formulas == {"Linear": "", "Linear + Delta": "K + "}
    assert "R = 1 + ceil(log2(W - 1)) the rounds" in page
    megabytes = r"([\d.]+) MB"
    said = re.search(f"a Linear layer sends {megabytes}, a Delta layer {megabytes}", page)
    assert said and "With 8 heads of 128, one row and 8 ranks a Linear layer" in page
    heads, size, rounds = 8, 128, 1 + math.ceil(math.log2(8 - 1))
    sent = [4 * heads * size * columns * rounds for columns in (size + 1, 2 * size + 1)]
    assert sent == [2_113_536, 4_210_688]  # by hand, with 4 rounds
    assert list(said.groups()) == [f"{number / 1e6:.1f}" for number in sent]


def test_the_keys_found_in_a_million_tokens_are_those_of_their_table() -> None:
    titles = {
        "With a penalty on writes (ours)": ("{}, scratch, penalty on writes", "published"),
        "With that penalty and length extension (ours)": ("{}, scratch, length extension", "published"),
        "With neither": ("{}, scratch, no penalty on writes", "published"),
        "The paper's protocol, fine-tuned for 400 steps": ("{}, PG19, fine-tuned 400 steps", "published"),
        "Fine-tuned on at most 512 tokens, with the penalty (ours)": (
            "{}, PG19, fine-tuned 400 steps, short inputs",
            "published",
        ),
        "The paper's protocol, zero-shot": ("{}, PG19, zero-shot", "published"),
        "The memory emptied before every segment": ("Control: {}, memory knocked out", "published"),
        "The paper's model, fine-tuned for 400 steps": ("{}, PG19, fine-tuned 400 steps", "paper"),
        "The paper's model, zero-shot": ("{}, PG19, zero-shot", "paper"),
    }
    page = (ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8")
    percent = r"([\d.]+ / [\d.]+ / [\d.]+)"
    rows = re.findall(rf"^\| ([^|]+) \| {percent} \| {percent} \|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(titles)
    for name, *found in rows:
        title, source = titles[name]
        for rule, said in zip(("Linear", "Linear + Delta"), found, strict=True):
            published = row_of("tables/table3_passkey_laptop.md", title.format(rule), source).split("|")[-2]
            assert said.replace(" ", "") == published.strip(" *")


def test_perplexities_by_training_tokens_are_those_of_their_table() -> None:
    """The page also has the paper's comparison of Linear with sixteen times the tokens and the others without."""
    names = {
        "Full attention (windows of 384)": "Full attention",
        "Infini-attention, Linear, memory decays (ours)": "Linear, memory decays",
        "Infini-attention, Linear + Delta": "Linear + Delta",
        "Infini-attention, Linear": "Linear",
        "Local attention, no memory": "Local attention only",
        "Local attention": "Local attention only",
    }
    published = read_table("table2_budget_laptop.md")
    page = (ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8")
    for text, budgets, n_rows in ((README, (1, 16), 7), (page, (1, 4, 16), 10)):
        numbers = r" \| ".join([r"(?:[\d.]+(?: ± [\d.]+)?|—)"] * 2 * len(budgets))
        rows = re.findall(rf"^\| ([^|]+) \| ({numbers}) \|$", text, re.MULTILINE)
        assert len(rows) == n_rows
        for name, values in rows:
            row = names.get(name, name)
            found: dict[int, list[str]] = {}
            for budget in budgets:
                after = " the tokens" if row == "Local attention only" else ""
                title = row if budget == 1 else f"{row}, {budget} times{after}"
                line = next((line for line in published if line.startswith(f"| {title} |")), "| | — | — |")
                if budget == 1 and row in ("Compressive Transformer", "AutoCompressors"):
                    line = "|" + "|".join(row_of("tables/table2_lm_laptop.md", row).split("|")[1::2])
                cells = (cell.strip().removesuffix(" (3)") for cell in line.split("|")[2:4])
                found[budget] = [cell.split()[0] if text is README else cell for cell in cells]
            assert values == " | ".join(found[budget][column] for column in (0, 1) for budget in budgets)
    linear, memorizing, cached = (
        row_of("tables/table2_as_compared_laptop.md", name).split("|")[2:6]
        for name in ("Linear, 16 times the tokens", "Memorizing Transformers", "Transformer-XL")
    )
    of_paper, ours, mathematics_of_paper, mathematics = (
        [f"{float(linear[column].split()[0]) / float(other[column].split()[0]):.2f}" for other in (memorizing, cached)]
        for column in range(4)
    )
    divided = " / ".join(cells[1].split()[0] for cells in (linear, memorizing))
    said = f"{divided} = {ours[0]} times the perplexity of Memorizing Transformers (the paper: {of_paper[0]})"
    assert said in README
    said = (
        f"on books it has {ours[0]} times the perplexity of Memorizing Transformers and {ours[1]} times that of "
        f"Transformer-XL (the paper: {' and '.join(of_paper)}), on mathematics {' and '.join(mathematics)} times "
        f"(the paper: {' and '.join(mathematics_of_paper)})"
    )
    assert said in page


def test_the_perplexities_with_a_decaying_memory_are_those_of_their_table() -> None:
    page = (ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8")
    text, page = (" ".join(part.split()) for part in (README, page))
    names = ("Linear, memory decays", "Transformer-XL")
    rows = (row_of("tables/table2_decay_laptop.md", name).split("|") for name in names)
    (books, mathematics), (books_xl, mathematics_xl) = ([row[column].split()[0] for column in (2, 3)] for row in rows)
    said = (
        f"Linear has {books} on books and {mathematics} on mathematics; Transformer-XL has {books_xl} and "
        f"{mathematics_xl} "
    )
    assert f"{said}([table]" in text
    cells = (row_of("tables/table2_budget_laptop.md", f"{name}, 4 times").split("|")[3] for name in names)
    longer = (cell.split()[0] for cell in cells)
    said = "With the decay and four times the tokens it has {} on mathematics, Transformer-XL {} (three seeds"
    assert said.format(*longer) in text
    said = f"On mathematics Linear has {mathematics} with it and 25.48 without, Transformer-XL {mathematics_xl} (the"
    assert said in page
    assert f"On books it has {books} with it and 61.90 without, Transformer-XL {books_xl} ([table]" in page


def test_the_perplexities_in_segments_of_128_are_those_of_their_table() -> None:
    names = ("Linear", "Local attention only", "Transformer-XL", "Linear, with Transformer-XL's cache")
    linear, local, cache, both = (
        row_of("tables/table2_segments_of_128_laptop.md", name).split("|")[2].split()[0] for name in names
    )
    text = " ".join(README.split())
    assert f"Linear has {linear}, local attention {local} (not significant) and Transformer-XL, which sees the" in text
    assert f"previous segment, {cache}, significantly ahead of Linear (three seeds" in text
    page = " ".join((ROOT / "docs" / "explanation" / "results.md").read_text(encoding="utf-8").split())
    effects = [line for line in read_table("table2_segments_of_128_laptop.md") if line.startswith("| Linear | +")]
    p_of_gain = effects[0].split("|")[7].strip()
    assert float(p_of_gain) > 0.05 and f"p = {p_of_gain} among the 11 comparisons of the table" in page
    means = [
        row_of("tables/table2_segments_of_128_laptop.md", name).split("|")[2].removesuffix(" (3) ").strip()
        for name in (*reversed(names[:2]), "Transformer-XL", "Memorizing Transformers", "RMT")
    ]
    assert f"local attention {means[0]}, Linear {means[1]}: " in page
    assert f"Transformer-XL {means[2]}, Memorizing Transformers {means[3]} (" in page and f"RMT {means[4]}, " in page
    behind = "- Transformer-XL, Arxiv-math published "
    (line,) = (line for line in read_table("table2_segments_of_128_laptop.md") if line.startswith(behind))
    (run,) = re.findall(r"\[`([\w-]+-s1-\w+)`\]", line)
    first = json.loads((ROOT / "results" / "runs" / f"{run}.json").read_text(encoding="utf-8"))["results"]["perplexity"]
    assert f"Transformer-XL {first['value']:.2f}, with the memory added {both} (" in page


def test_the_perplexities_of_the_llm_are_those_of_its_table() -> None:
    text = " ".join(README.split())
    names = ("SmolLM2, segments of 512", "Segments of 512 and memory (Linear), untrained")
    segments, memory = (row_of("tables/llm_continual_laptop.md", name).split("|")[2].strip() for name in names)
    assert f"Untrained, the books have {memory} with a memory and {segments} without" in text
    llm_results = (ROOT / "docs" / "explanation" / "llm_results.md").read_text(encoding="utf-8")
    said = f"in segments of 512, the perplexity of SmolLM2 is {memory} with the memory (Linear) and {segments} without"
    assert said in " ".join(llm_results.split())
    page = llm_results.splitlines()
    first = next(number for number, line in enumerate(page) if line.startswith("| SmolLM2, perplexity of"))
    published = read_table("llm_continual_laptop.md")
    begin = published.index("| Model | PG19 published | Arxiv-math published |") + 2
    rows = [line.replace(" (3)", "") for line in published[begin : published.index("", begin)]]
    # The page's text has what the untrained rows say.
    rows = [line for line in rows if not line.split("|")[1].endswith(", untrained ")]
    assert len(rows) >= 9 and page[first + 2 : page.index("", first)] == rows


def test_the_gains_of_the_llm_are_those_of_its_tables() -> None:
    page = (ROOT / "docs" / "explanation" / "llm_results.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(page) if line.startswith("| loss with the memory minus"))
    stated = page[first + 2 : page.index("", first)]
    rows = {
        "Linear, untrained": "Segments of 512 and memory (Linear), untrained",
        "Linear + Delta, untrained": "Segments of 512 and memory (Linear + Delta), untrained",
        "Linear, trained (three seeds)": "Segments of 512 and memory (Linear), trained",
        "Linear + Delta, trained (three seeds)": "Segments of 512 and memory (Linear + Delta), trained",
        "Linear, trained, 32,768 tokens of each test document": "Segments of 512 and memory (Linear), trained",
        "Linear + Delta, trained, 32,768 tokens of each test document": (
            "Segments of 512 and memory (Linear + Delta), trained"
        ),
        "Linear, trained, beside the segment before": "With the segment before and memory (Linear), trained",
        "Linear + Delta, trained, beside the segment before": (
            "With the segment before and memory (Linear + Delta), trained"
        ),
        "Linear, gates nearly shut, all weights at the paper's rate": (
            "Memory (Linear), gates nearly shut, all weights at the paper's rate"
        ),
        "Linear, gates from 0.5, all weights at the paper's rate": (
            "Memory (Linear), gates from 0.5, all weights at the paper's rate"
        ),
    }
    found = []
    for said, row in rows.items():
        published = read_table(f"llm_continual{'_test' * said.endswith('test document')}_laptop.md")
        # Each of the two corpora has a table with these columns.
        columns = [line.split("|") for line in published if line.startswith("| Model | Reset ")]
        at = columns[0].index(" Minus baseline ")
        cells = [line.split("|") for line in published if line.startswith(f"| {row} |")]
        gains = [line[at].strip() for line in cells if len(line) == len(columns[0])]
        found.append(f"| {said} | {' | '.join(gains).replace('+', '')} |")
    assert stated == found


def test_the_published_table_is_the_one_that_the_records_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["table", "report=table3_passkey", f"results_dir={tmp_path}"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    page = (ROOT / "docs" / "tutorials" / "start.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```\n(.*?)\n```", page, re.DOTALL) if block.startswith("Passkey"))
    assert block in printed


def test_the_summaries_of_the_page_are_those_of_their_runs() -> None:
    page = (ROOT / "docs" / "explanation" / "summaries.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\[(\S+)\]\(\S+\), (\S+):\n\n```text\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert len(shown) == page.count("```text") == 5
    for name, book, text in shown:
        lines = (ROOT / "results" / "runs" / name).read_text(encoding="utf-8").splitlines()
        written = {entry["name"]: entry["summary"] for entry in map(json.loads, lines)}
        assert text == written[book].strip()


def test_the_times_of_the_tables_are_those_of_their_records() -> None:
    """The times are those of the runs behind each published table, of their trainings, and of the starts of these."""
    page = (ROOT / "docs" / "explanation" / "provenance.md").read_text(encoding="utf-8")
    known = {path.stem: path for path in (ROOT / "results" / "runs").glob("*.json")}
    rows, totals = [], {}
    for table in sorted((ROOT / "results" / "tables").glob("*_laptop.md")):
        named = set(re.findall(r"\(\.\./runs/(.*?)\.json\)", table.read_text(encoding="utf-8")))
        runs: dict[str, Any] = {}
        while left := named - set(runs):
            runs |= {run: json.loads(known[run].read_text()) for run in left}
            named |= {runs[run]["parent"] or runs[run]["config"]["init_from"] for run in left} - {None}
        by_verb: dict[str, list[float]] = {"train": [], "eval": []}
        for run in runs.values():
            if run["verb"] in by_verb:
                by_verb[run["verb"]].append(run["cost"]["wall_seconds"])
        (n_trainings, training), (n_evaluations, evaluation) = ((len(s), sum(s) / 3600) for s in by_verb.values())
        if not n_trainings + n_evaluations:
            continue
        name = table.stem.removesuffix("_laptop")
        totals[name] = training + evaluation
        trained = f"{n_trainings}, {training:.1f} h | {max(by_verb['train']) / 60:.0f}" if n_trainings else "0 | —"
        evaluated = f"{n_evaluations}, {evaluation:.1f} h" if n_evaluations else "0"
        rows.append(f"| `{name}` | {trained} | {evaluated} | {totals[name]:.1f} h |")
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith(" h |")] == rows
    stated = re.findall(r"report=(\w+)[^|]*\| ([\d.]+) h", README)
    assert {"table2_lm", "table3_passkey", "table4_booksum"} <= {name for name, _ in stated}
    assert all(f"{totals[name]:.1f}" == hours for name, hours in stated)


def test_targets_are_in_the_makefile() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for words in re.findall(r"`make ([\w -]+)`", text) + re.findall(r"^make ([\w -]+)$", text, re.MULTILINE):
            for target in words.split():
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"{page.name}: {target}"


@pytest.mark.skipif(shutil.which("make") is None or torch.cuda.is_available(), reason="needs make, and no GPU")
def test_make_gpu_ends_at_once_without_a_gpu(tmp_path: Path) -> None:
    """All tests that need one would be skipped, and the next start on a GPU would not run them."""
    given = [f"BIN={Path(sys.executable).parent}", f"GPU={tmp_path / 'gpu'}"]
    words = ["make", "--silent", "--old-file=.venv/.installed-dev", "gpu", *given]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("make gpu: torch sees no GPU here\n") and not done.stdout
    assert not (tmp_path / "gpu").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_processes_that_make_starts_keep_their_bytecode() -> None:
    """Otherwise each of them compiles all packages it imports again."""
    words = ["make", "--silent", "--eval=asked:; @echo [$$PYTHONDONTWRITEBYTECODE]", "asked"]
    surroundings = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run(words, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


def test_the_layers_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "InfiniAttention" in block)
    names: dict[str, object] = {}
    exec(compile(code.replace("10_000", "2_500"), "README.md", "exec"), names)
    assert names["y"].shape == (1, 500, 512)  # type: ignore[attr-defined]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize("row", [TUNED_LLM, TUNED_LLM.replace("Linear", "Linear + Delta", 1)], ids=["linear", "delta"])
def test_the_prompts_of_the_papers_order_are_those_of_its_run(row: str) -> None:
    """No key is found where the memory is needed, and all others are."""
    table = "\n".join(read_table("llm_passkey_laptop.md"))
    run_ids = set(re.findall(rf"^- {re.escape(row)}, .*runs/([\w-]+)\.json\)$", table, re.MULTILINE))
    records = [json.loads((ROOT / "results" / "runs" / f"{run_id}.json").read_text("utf-8")) for run_id in run_ids]
    cells = [cell for record in records for cell in record["series"]["cells"]]
    assert {(cell["same_segment"], cell["exact_match"]) for cell in cells} == {(0.0, 0.0), (1.0, 1.0)}
    usual = [cell for cell in cells if cell["length"] <= 2**15]
    needed, others = (sum(cell["examples"] for cell in usual if cell["same_segment"] == near) for near in (0.0, 1.0))
    page = " ".join((ROOT / "docs" / "explanation" / "llm_results.md").read_text(encoding="utf-8").split())
    assert re.search(
        rf"^\| In the paper's order, .*, each of the two rules \| 1K to 32K \| 0 / {needed} \|$", README, re.M
    )
    assert f"none of {needed} with either rule, at 1K to 32K, and all of {others} in the question's segment" in page


def keys_of_rows() -> dict[str, dict[int, tuple[int, int]]]:
    """Row -> tokens of the text -> keys found and asked, of those in an earlier segment than the question."""
    report = load_report(compose(["report=llm_passkey"]).report)
    assert isinstance(report, PasskeyReport)
    counts: dict[str, dict[int, tuple[int, int]]] = {}
    for name, runs in select_runs(report, "laptop", load_records(ROOT / "results")).runs.items():
        cells = [cell for _, cell in chosen_cells(report, runs).values() if cell["same_segment"] == 0]
        for length in parse_lengths(report.lengths):
            at = [cell for cell in cells if cell["length"] == length]
            found = sum(round(cell["exact_match"] * cell["examples"]) for cell in at)
            counts.setdefault(name, {})[length] = found, sum(cell["examples"] for cell in at)
    return counts


def summed(counts: Iterable[tuple[int, int]]) -> str:
    """Keys found and asked, as the README has them."""
    return " / ".join(str(sum(each)) for each in zip(*counts, strict=True))


def test_the_keys_of_the_llm_are_those_of_its_runs() -> None:
    """Of all runs of each row together; the page has every row, the README some."""
    report, counts = load_report(compose(["report=llm_passkey"]).report), keys_of_rows()
    rows = [
        f"| {report.short_titles[name]} | "
        + " | ".join(f"{found} / {asked}" if asked else "—" for found, asked in by_length.values())
        + " |"
        for name, by_length in counts.items()
    ]
    page = (ROOT / "docs" / "explanation" / "llm_results.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(page) if line.startswith("| keys found / asked"))
    assert page[first + 2 : page.index("", first)] == rows
    # The page says of each row how it is made.
    first = next(number for number, line in enumerate(page) if line.startswith("| row | key | trained"))
    keys = [line.split("|")[2] for line in page[first + 2 : page.index("", first)]]
    assert [key for cell in keys for key in re.findall(r"`(\w+)`", cell)] == list(counts)
    gated, books = counts["linear_input_gate"], counts["delta_input_gate_books"]
    up_to_32k = summed(count for length, count in gated.items() if length <= 2**15)
    (needles,) = (
        [
            (float(share) * int(asked) / 100, int(asked))
            for share, asked in re.findall(r"\| ([\d.]+) \[[^]]*\], (\d+)", line)
        ]
        for line in read_table("long_context_laptop.md")
        if line.startswith("| Segments of 128 and memory (Linear + Delta) with an input gate, ")
        and re.search(r"\], \d", line)
    )
    for said in (
        f", Linear, two seeds | 1K to 32K | {up_to_32k} |",
        f"| One of these two models | 128K | {summed([gated[2**17]])} |",
        f"| The other one with its memory emptied | 1K to 8K | {summed(counts['linear_input_gate_reset'].values())} |",
        f"| The same recipe, Linear + Delta | 1K to 32K | {summed(counts['delta_input_gate'].values())} |",
        f"not trained | 1K to 8K | {summed((round(found), asked) for found, asked in needles[:4])} |",
        *(
            f"{said} | 1K; 2K to 8K | {summed([found[2**10]])}; {summed(found[2**n] for n in (11, 12, 13))} |"
            for said, found in (("did not have", books), ("sentences of books", counts["delta_trained_on_books"]))
        ),
    ):
        assert said in README
