"""Table 1: the paper's formulas, what the models carry, and the sizes that the paper prints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from report_runs import make_train

from infini.cli.main import main
from infini.config.compose import compose
from infini.errors import InputError
from infini.models import build_model
from infini.nn.protocols import optional
from infini.nn.state import State, is_memory, leaves, memory_floats
from infini.records import xl_cache
from infini.report.footprint import PAPER, TABLE1, MemoryReport, Symbols, printed
from infini.report.load import load_report, report_of_runs
from infini.runs import table_memory
from infini.runs.table_memory import measure, table

SIZES = ["dims.d_model=16", "dims.n_layers=3", "dims.n_heads=4", "dims.d_key=6", "dims.d_value=10"]
SIZES += ["dims.segment_length=8", "recipe.segments_per_sequence=2"]


def evaluated(formula: str, s: Symbols) -> int:
    """A formula as it is printed, evaluated by Python."""
    return int(eval(formula.replace(" x ", " * "), dict(vars(s))))


def sizes(model: str, *overrides: str) -> list[str]:
    return [*SIZES, f"model={model}", *overrides]


# d_model 16, 3 layers, 4 heads of 6 and 10, 5 segments of 8: the paper's formula, and what is carried.
CASES: list[tuple[list[str], int, int]] = [
    (sizes("transformer_xl"), 16 * 4 * 8 * 3, 16 * 4 * 8 * 3),
    (sizes("transformer_xl", "model.positions=dai2019"), 16 * 4 * 8 * 3, 16 * 8 * 3),
    (sizes("transformer_xl", "dims.n_kv_heads=2"), 16 * 4 * 8 * 3, 16 * 2 * 8 * 3),
    (sizes("compressive", "model.rate=4"), 16 * (8 + 8) * 3, 16 * (8 + 8) * 3),
    (sizes("compressive", "model.compressed_segments=2"), 16 * (16 + 8) * 3, 16 * (16 + 8) * 3),
    (sizes("compressive", "model.memory_segments=2"), 16 * (8 + 8) * 3, 16 * (8 + 16) * 3),
    # The memory is 2 x 2 segments long.
    (sizes("memorizing"), 16 * 4 * 8 * 5, 16 * 4 * (4 * 8 + 3 * 8)),
    (sizes("rmt", "model.memory_tokens=7"), 16 * 7 * 3 * 2, 16 * 7),
    (sizes("autocompressor", "model.summary_tokens=3"), 16 * 3 * (8 + 1) * 3, 16 * 3 * 8),
    (sizes("infini_linear"), 6 * 11 * 4 * 3, 6 * 11 * 4 * 3),
    (sizes("infini_delta", "dims.n_kv_heads=1"), 6 * 11 * 4 * 3, 6 * 11 * 1 * 3),
]


@pytest.mark.parametrize(("overrides", "paper", "carried"), CASES)
def test_what_is_carried_is_what_is_declared_and_the_papers_formula_where_they_agree(
    overrides: list[str], paper: int, carried: int
) -> None:
    cfg = compose(overrides)
    found = measure(cfg, segments=5)
    assert found.carried == found.declared == carried
    assert TABLE1[cfg.model["name"]].floats(found.s) == paper
    if cfg.model.get("positions") != "dai2019":
        assert evaluated(TABLE1[cfg.model["name"]].carried, found.s) == carried


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        *((sizes(model), 8) for model in ("transformer_xl", "memorizing", "infini_xl", "compressive")),
        (sizes("compressive", "model.memory_segments=2"), 16),
        *((sizes(model), 0) for model in ("local", "full", "infini_linear", "rmt")),
    ],
)
def test_models_declare_their_xl_cache(overrides: list[str], tokens: int) -> None:
    """The records of trainings have it; trainings before that are known by their models, with the same result."""
    cfg = compose(overrides)
    assert optional(build_model(cfg.model, cfg.dims, 16), "xl_cache") == tokens
    older = make_train(cfg.model["name"], 1, config={"dims": {"segment_length": 8}, "model": cfg.model})
    assert xl_cache(older, older) == (tokens or None)
    older.cost["xl_cache"] = 40
    assert xl_cache(older, older) == 40


@pytest.mark.parametrize("model", TABLE1)
def test_what_is_measured_has_read_its_segments(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def count(state: State) -> int:
        counted.append(state)
        return memory_floats(state)

    monkeypatch.setattr(table_memory, "memory_floats", count)
    measure(compose(sizes(model)), segments=5)
    assert counted[0].clock.position_B.tolist() == [5 * 8]
    memory = [leaf for path, leaf in leaves(counted[0]) if is_memory(path)]
    assert memory and all(bool(leaf.any()) for leaf in memory)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (sizes("transformer_xl"), 8 * 3),
        (sizes("compressive", "model.rate=4"), (8 * 4 + 8) * 3),
        # A memory of 2 x 12 segments.
        (sizes("memorizing", "model.memory_segments=12"), 20 * 8),
        (sizes("infini_linear"), 20 * 8),
    ],
)
def test_contexts(overrides: list[str], tokens: int) -> None:
    found = measure(compose(overrides), segments=20)
    assert TABLE1[compose(overrides).model["name"]].tokens(found.s) == tokens
    # Table 1 leaves out the segment that is being read, except where all segments count.
    assert found.context in (tokens, tokens + 8)


def test_the_sizes_that_the_paper_prints_follow_from_its_formulas() -> None:
    millions: Callable[[float], str] = lambda value: f"{value / 1e6:.1f}".removesuffix(".0")  # noqa: E731
    for _, text, value, _ in printed():
        if text.endswith("x"):
            assert text in (f"{value:.1f}x", f"{value:.0f}x")
        else:
            assert text in (f"{millions(value)}M", f"{value / 1e6:.0f}M")
    assert {value for _, text, value, _ in printed() if text.endswith("M")} == {
        50_331_648,
        183_451_648,
        2_457_600,
        1_585_152,
    }
    # "65K" is not 2 to the 16th.
    more = 256 * 8 * 65_536 + TABLE1["transformer_xl"].floats(PAPER)
    assert f"{more / 1e6:.0f}M" == "185M"


def test_every_symbol_of_a_formula_counts() -> None:
    """A formula as it is printed, evaluated by Python, is the function beside it."""
    s = Symbols(N=3, S=5, l=7, H=11, G=2, d_model=13, d_key=17, d_value=19, c=23, r=29, p=31, m=37)
    for entry in TABLE1.values():
        for text, value in ((entry.footprint, entry.floats(s)), (entry.context, entry.tokens(s))):
            assert evaluated(text, s) == value


def test_the_table_has_all_models_and_says_the_sizes(capfd: pytest.CaptureFixture[str]) -> None:
    declared = load_report(compose(["report=table1_memory", *SIZES]).report)
    assert isinstance(declared, MemoryReport)
    report = table(declared, compose(["report=table1_memory", *SIZES]), ["report=table1_memory", *SIZES])
    formulas, numbers, prints = report.tables
    # The short form has the sizes, and what the letters mean.
    assert report.short().tables == (numbers,) and report.short().notes == report.notes[-2:]
    assert report.notes[-2].startswith("Letters: N tokens a segment, S segments")
    assert [row.model for row in formulas.rows] == [row.model for row in numbers.rows] == list(TABLE1)
    assert numbers.cell("infini_linear", "measured").value == 6 * 11 * 4 * 3
    assert numbers.cell("rmt", "Times Infini-Transformer").value == pytest.approx(16 / (6 * 11 * 4 * 3))
    assert prints.cell("infini_linear", "Number").text == "1,585,152"
    assert "S 2" in report.notes[-1] and "AutoCompressors: p 1, m 8" in report.notes[-1]


def test_it_is_printed_and_written_by_the_command(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("results")
    words = ["report=table1_memory", "report.segments=3", f"results_dir={folder}", "full=true", *SIZES]
    assert main(["table", *words]) == 0
    out = capfd.readouterr().out
    assert "after 3 segments of 8 tokens" in out and "183,451,648" in out
    assert (folder / "tables" / "table1_memory_laptop.md").is_file()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"segments": 0}, "report.segments=0: must be null, or a number of at least 1"),
        ({"models": ["rtm"]}, "report.models: Table 1 has no 'rtm'.*rmt"),
        ({"row": 1}, "report.row=1: no such key of report; allowed: models, name, "),
    ],
)
def test_what_is_wrong_is_one_line(config: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_report({**compose(["report=table1_memory"]).report, **config})


@pytest.mark.parametrize("verb", ["publish", "reproduce", "draw"])
def test_there_is_nothing_to_run(verb: str) -> None:
    with pytest.raises(InputError, match=f"has no runs of its own to {verb}; print it with `infini table report="):
        report_of_runs(compose(["report=table1_memory"]).report, verb)
