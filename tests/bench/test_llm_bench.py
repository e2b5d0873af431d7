"""`infini bench suite=llm_generate` on a tiny base: what is measured, its tables, its figure, and where lines cross."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from command_runner import Runner
from tiny_llms import write_tiny_base

from infini import records
from infini.bench import prompts
from infini.cli import main as cli
from infini.commands import verbs
from infini.config.compose import compose
from infini.config.schema import key_of
from infini.report.load import load_report
from infini.report.prompt_costs import BASE_CACHE, MEASURES, Measure, build_prompt_report, crossing, curves
from infini.runs import bench, figure

SUITE = ["suite=llm_generate", "suite.prompt_tokens=[64,24]", "suite.prompt_segments=[8,16]", "parallel.precision=fp32"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


def without_sizes(settings: list[str]) -> list[str]:
    """A base has its own."""
    return [text for text in settings if not text.startswith(("dims.", "scale.vocab_size"))]


@pytest.fixture(scope="module")
def results(corpus: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the suite on prompts of 24 tokens, twice, and of 64. They are made once; tests work on a copy."""
    folder = tmp_path_factory.mktemp("measured")
    words = [*without_sizes(Runner(corpus, folder, None).settings), *SUITE, f"model.base={base}"]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
        for name, value in (("TOKENS_PER_CALL", 16), ("NEW_TOKENS", 4), ("REPEATS", 2), ("REPEATED_TOKENS", 32)):
            patch.setattr(prompts, name, value)
        assert cli.main(["bench", *(text for text in words if verbs()["bench"].reads(key_of(text)))]) == 0
    return folder


@pytest.fixture
def measured(infini: Runner, results: Path, elsewhere: None) -> Runner:
    shutil.copytree(results, infini.results)
    return infini


# Crossing points of lines, worked out on paper.


def test_lines_that_cross_once() -> None:
    """The lines have slopes 1 and 2 in the logarithms; the lengths do not matter."""
    lengths = [2.0, 8.0, 16.0, 128.0]
    ours, theirs = [10 * n for n in lengths], [n**2 for n in lengths]
    assert crossing(lengths, ours, theirs) == pytest.approx(10)
    assert crossing(lengths, theirs, ours) is None


def test_lines_that_never_or_always_cross() -> None:
    lengths = [2.0, 4.0, 8.0]
    assert crossing(lengths, [1.0, 1.0, 1.0], [2.0, 3.0, 4.0]) == 0
    assert crossing(lengths, [1.0, 1.0, 4.0], [2.0, 3.0, 4.0]) is None
    assert crossing([2.0], [1.0], [2.0]) == 0 and crossing([2.0], [2.0], [1.0]) is None


def test_the_last_of_several_crossings_counts() -> None:
    """Below at first, above at 4, below at 8 and equal at 16: from there on below."""
    lengths = [2.0, 4.0, 8.0, 16.0, 32.0]
    assert crossing(lengths, [1.0, 4.0, 1.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0, 4.0]) == pytest.approx(16)
    # Halfway between the logarithms.
    assert crossing(lengths[:2], [2.0, 1.0], [1.0, 2.0]) == pytest.approx(math.sqrt(8))


# The suite.


def test_what_is_measured(measured: Runner, base: Path) -> None:
    """Every way at every length; the memory has the same bytes at all of them, the own cache those of its tokens."""
    (run,) = measured.records()
    found = run.series["prompts"]
    assert (run.verb, run.model, run.config["dims"]["d_model"]) == ("bench", "llm", 16)
    assert found["base"]["name"] == base.name and found["options"]["update_rule"] == "delta"
    assert {n: len(ways[BASE_CACHE]["read_seconds"]) for n, ways in found["lengths"].items()} == {"24": 2, "64": 1}
    for ways in found["lengths"].values():
        assert set(ways) == {BASE_CACHE, "8", "16"}
        for one in ways.values():
            assert set(one) == {measure.key for measure in MEASURES}
            assert all(value > 0 for key in ("read_seconds", "decode_milliseconds") for value in one[key])
    cache = {way: [int(points[n]) for n in (24, 64)] for way, points in curves(run, _in_bytes()).items()}
    # Layers x (keys, values) x one head of 8 x 4 bytes; the prompt and four tokens, two of them before its length.
    per_token = 2 * 2 * 8 * 4
    assert cache[BASE_CACHE][1] - cache[BASE_CACHE][0] == (64 - 24) * per_token
    assert cache["8"][0] == cache["8"][1] and cache["16"][0] == cache["16"][1]
    assert cache["16"][0] - cache["8"][0] == 8 * per_token


def _in_bytes() -> Measure:
    return replace(next(m for m in MEASURES if m.key == "cache_bytes"), scale=1)


def test_tables_and_figure(measured: Runner) -> None:
    """The same from your record and from a published one; the figure's bytes depend on the record alone."""
    out = measured("table", "report=llm_generate", "full=true")
    for text in (
        "Seconds to read a prompt",
        "memory, segments of 16",
        "its own cache",
        "24: medians of 2 interleaved repeats",
    ):
        assert text in out
    assert "64: read once" in out and "Where the memory overtakes" in out
    cfg = compose([f"results_dir={measured.results}"])
    _, *paths = figure._draw_bench("llm_generate", cfg, [measured.results])
    png, svg = map(Path, paths)
    assert (png.name, svg.name) == ("llm_generate_laptop.png", "llm_generate_laptop.svg")
    before = png.read_bytes(), svg.read_bytes()
    measured("figure", "report=llm_generate")
    assert (png.read_bytes(), svg.read_bytes()) == before
    # The run counts as made from a clean tree.
    (run,) = measured.records()
    run.environment.update(git_dirty=False, git_revision="0" * 40)
    records.write_record(run, measured.results)
    written = measured("publish", "report=llm_generate").splitlines()
    assert [path.name for path in map(Path, written)] == [
        f"{run.run_id}.json",
        *(f"llm_generate_laptop.{kind}" for kind in ("md", "tex", "csv", "png")),
    ]
    assert [found.run_id for found in records.load_records(records.published_dir())] == [run.run_id]


def test_crossing_points_in_words(measured: Runner) -> None:
    """The numbers of this record are known."""
    (run,) = measured.records()
    lengths = run.series["prompts"]["lengths"]
    run.series["prompts"]["lengths"] = {"2048": lengths["24"], "8192": lengths["64"]}
    for n, own, small, large in (("2048", 1.0, 2.0, 0.5), ("8192", 4.0, 2.0, 5.0)):
        for way, value in ((BASE_CACHE, own), ("8", small), ("16", large)):
            for measure in MEASURES:
                run.series["prompts"]["lengths"][n][way][measure.key] = [value * measure.scale]
    report = load_report(compose(["report=llm_generate"]).report)
    *others, crossings = build_prompt_report(report, "laptop", run, "yours").tables
    assert [row.model for row in others[0].rows] == [BASE_CACHE, "16", "8"]
    # Two of the four new tokens belong to the length.
    assert others[0].columns == ("2K", "8K") and others[1].cell("8", "8K").text == "4,095"
    assert crossings.cell("8", "Reads faster from").text == "4.0K"
    assert crossings.cell("16", "Cache smaller from").text == "not up to 8K"
    run.series["prompts"]["lengths"]["8192"]["16"]["peak_bytes"] = [0.0]
    *_, crossings = build_prompt_report(report, "laptop", run, "yours").tables
    assert crossings.cell("16", "Peak lower from").text == "the shortest (2K)"


def test_without_a_measurement_it_says_how_to_make_one(infini: Runner, elsewhere: None) -> None:
    infini.results.mkdir()
    assert "no measurement yet: infini bench suite=llm_generate" in infini("table", "report=llm_generate")
    assert "make it with `infini bench suite=llm_generate`" in infini.error("figure", "report=llm_generate")
    assert "no measurement of suite=llm_generate" in infini.error("publish", "report=llm_generate")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["suite.prompt_tokens=[0]"], "suite.prompt_tokens=[0]: must be whole numbers of at least 1"),
        (["suite.prompt_segments=[]"], "suite.prompt_segments=[]: must name at least one"),
        (["suite.prompt_segments=[x]"], "suite.prompt_segments"),
        (["model.memory=none"], "model.memory='none': suite.prompt_tokens measures the memory beside"),
        (["model.sinks=9"], "sinks=9: must be from 0 to segment_length=8"),
        (["report.suite=train"], "report.suite"),
    ],
)
def test_one_line_for_a_mistake(
    infini: Runner, base: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    infini.settings = without_sizes(infini.settings)
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    assert said in infini.error("bench", *SUITE, f"model.base={base}", *words)
    assert not infini.records()


def test_a_model_without_a_base_has_nothing_to_compare(infini: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "matrix_product_rate", lambda precision, device: (1e12, "float32"))
    message = infini.error("bench", "suite=train", "suite.repeats=0", "suite.prompt_tokens=[8]")
    assert message.startswith("suite.prompt_tokens=[8]: model=infini_linear has no cache to compare with")
