"""Settings that would change nothing are refused in one line, and words that are no settings are explained."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runner import Runner
from tiny_runs import TINY

from infini import records
from infini.cli import main as cli
from infini.commands import verbs
from infini.config.compose import compose
from infini.config.schema import Config, groups, key_of
from infini.models import kind_of
from infini.runs import reproduce, reproduce_booksum, reproduce_passkey, reproduce_text, train
from infini.training import compiled

pytestmark = pytest.mark.usefixtures("elsewhere")


def error(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command is answered with."""
    assert cli.main(list(words)) == 2
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "Traceback" in line] == [] and said[-1].startswith("infini: error: ")
    return said[-1].removeprefix("infini: error: ")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Verbs that only write down their names, where the hub could give what they read."""
    monkeypatch.setattr("infini.runs.common.reachable", lambda: True)
    called: list[str] = []
    for name, verb in verbs().items():
        module = types.ModuleType(verb.module)
        module.run = lambda *given, name=name, **extra: called.append(name)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, verb.module, module)
    return called


def test_every_verb_says_of_every_key_whether_it_reads_it() -> None:
    for verb in verbs().values():
        assert all(map(verb.reads, (*verb.groups, *verb.choices, *verb.keys))), verb
    fields = {field.name for field in dataclasses.fields(Config)}
    known = {*groups(), *fields, "experiment", "tuned"}
    assert {pattern.partition(".")[0] for verb in verbs().values() for pattern in verb.patterns} <= known
    # Nothing is read by no verb.
    assert all(any(verb.reads(key) for verb in verbs().values()) for key in fields)


@pytest.mark.parametrize(
    "line",
    [
        *("train suite=all", "train decoding.top_p=0.5", "train report.run=all", "train task.examples=3"),
        *("train task=booksum task.reference=lead", "train scale.knockouts=false", "train length=1K"),
        *("eval logger=none", "eval suite=all", "generate prompt=a logger=csv", "generate prompt=a report=table2_lm"),
        *("generate prompt=a init_from=x", "generate prompt=a length=1K", "summarize book.txt task=pg19"),
        *("table model=local", "table dims=laptop", "table recipe.steps=3", "table checkpoint=x", "table length=1K"),
        *("table report=table2_lm task=arxiv_math", "table report=claims task=pg19", "table scale.vocab_size=300"),
        *("table report=table1_memory seed=3", "table report=table1_memory model=local", "table variant=x"),
        *("table report=lr_search optimizer.lr=0.1", "figure model=local", "figure parallel.accelerator=cpu"),
        *("publish report=table2_lm model=local", "publish report=table3_passkey recipe.steps=1", "publish suite=all"),
        *("reproduce length=1K", "reproduce variant=x", "reproduce decoding.temperature=0", "reproduce init_from=x"),
        *("reproduce checkpoint=x", "reproduce report=table3_passkey recipe=passkey_laptop", "reproduce suite=all"),
        *("reproduce report=table3_passkey task.knockout=reset", "reproduce report=table4_booksum depth=start"),
        *("reproduce report=table4_booksum task.split=test", "reproduce report=lr_search optimizer.lr=3"),
        *("bench logger=none", "bench task.data_dir=x", "bench optimizer.lr=1", "bench scale.vocab_size=300"),
    ],
)
def test_a_key_that_a_verb_does_not_read_is_refused(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = line.split()
    said = error(capfd, *words)
    assert said.startswith(f"{words[-1]}: infini {words[0]} does not read {key_of(words[-1])}"), said


@pytest.mark.parametrize(
    "line",
    [
        *("train scale.name=laptop", "train -m optimizer.name=adamw", "train logger.name=none"),
        *("eval task.name=passkey", "generate prompt=a model.name=local", "reproduce model.name=local"),
        *("table report.name=table2_lm", "figure +scale.name=gpu", "bench suite.name=all"),
    ],
)
def test_the_name_of_a_choice_is_not_set_by_hand(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A row of another model would pass for the model's, and a scale for a GPU for one of a processor."""
    words = line.split()
    group, _, value = words[-1].lstrip("+").partition(".name=")
    assert error(capfd, *words) == f"{words[-1]}: the choice of {group} sets its name; write {group}={value}"


def test_the_name_of_a_run_of_wandb_is_another_key(capfd: pytest.CaptureFixture[str]) -> None:
    said = error(capfd, "train", "logger=wandb", "logger.name=mine")
    assert said == "logger.name=mine: the choice of logger sets its name; write logger.run_name=mine"


def test_keys_of_wandb_are_refused_for_other_loggers(capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, "train", "logger.project=mine").endswith("allowed: name, validate_every; of logger=wandb")


def test_bench_measures_the_models_of_its_suite(capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, "bench", "model=local").startswith("model=local: infini bench measures suite.models")


def test_summaries_without_a_model_take_none(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "task=booksum", "task.reference=lead"]
    assert error(capfd, *words, "model=bart").startswith("model: task.reference=lead evaluates no model")
    assert error(capfd, *words, "checkpoint=x").startswith("checkpoint: task.reference=lead evaluates no model")
    assert error(capfd, "eval", "task=booksum", "task.reference_words=5") == (
        "task.reference_words=5: has no effect without task.reference; set both, or leave it out"
    )
    assert error(capfd, "eval", "decoding.top_p=0.5") == (
        "decoding.top_p=0.5: task=pg19 does not read it; add task=booksum"
    )


@pytest.mark.parametrize(
    "line",
    [
        "task=passkey report.split=train",
        "task=booksum report.split=validation",
        "task=passkey scale.knockouts=true",
        "task=booksum scale.knockout_max_tokens=5",
        "task=long_context scale.eval_segments_per_call=2",
    ],
)
def test_a_key_of_evaluations_of_other_tasks_is_refused(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The record would say that another split was measured, or another measure taken."""
    task, word = line.split()
    said = error(capfd, "eval", task, word)
    key, _, value = word.partition("=")
    assert said.lower().startswith(f"{key}={value}: {task} does not read it; add task=arxiv_math or ")


def test_an_evaluation_takes_no_other_setting_of_its_training(with_model: Runner) -> None:
    assert with_model.error("eval", "task.carry_state=false") == (
        "task.carry_state=False: the checkpoint was trained with True"
    )
    with_model("eval", "task.carry_state=true", code=0)


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        ("task=passkey", "recipe.excerpt_tokens=77"),
        ("model=rmt", "recipe.length_extension=8.0"),
        ("model=transformer_xl", "recipe.sparse_writes=0.5"),
    ],
)
def test_a_training_names_a_key_that_changes_nothing(chosen: str, word: str, infini: Runner) -> None:
    """The command line may not have such a key. A recipe may, because models are compared with one recipe."""
    short = ["recipe.segments_per_sequence=20", "recipe.curriculum=null", "recipe.short_sequences=null"]
    infini("train", chosen, word, *short, "recipe.steps=1")
    assert f"{word}: has no effect with {chosen}" in infini.err.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["task=passkey", "optimizer=adafactor", "recipe.schedule=constant"],
            {
                "scale.vocab_size=400": "task.tokenizer=words",
                "optimizer.betas=[0.8, 0.9]": "optimizer=adafactor",
                "recipe.final_lr_fraction=0.5": "recipe.schedule=constant",
                "recipe.length_extension_share=0.5": "recipe.length_extension=null",
                "parallel.compile=always": "model=infini_linear",
            },
        ),
        (
            # These have their effects.
            [
                *("task=pg19", "model=autocompressor", "optimizer=muon", "optimizer.betas=[0.8,0.9]"),
                *("recipe.final_lr_fraction=0.5", "scale.vocab_size=400"),
            ],
            {
                "recipe.length_extension=4.0": "model=autocompressor",
                "recipe.length_extension_share=0.5": "model=autocompressor",
                "parallel.compile=always": "model.bptt_depth=2",
            },
        ),
        (
            ["task=passkey", "recipe.length_extension=4", "recipe.length_extension_share=0.5", "parallel.compile=auto"],
            {"scale.vocab_size=400": "task.tokenizer=words", "scale.tokenizer=no/such": "task.tokenizer=words"},
        ),
        (
            ["task=pg19", "model=rmt", "recipe.checkpoint_activations=true"],
            {"parallel.compile=always": "recipe.checkpoint_activations=True"},
        ),
    ],
)
def test_a_training_names_a_key_that_changes_nothing_beside_other_settings(
    words: list[str], said: dict[str, str], infini: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no key that has its effect."""
    monkeypatch.setattr(compiled, "_missing", lambda: None)
    short = ["recipe.segments_per_sequence=20", "recipe.curriculum=null", "recipe.short_sequences=null"]
    infini("train", *words, *(word.replace(", ", ",") for word in said), *short, "recipe.steps=1")
    lines = [line for line in infini.err.splitlines() if not line.startswith("task.data_dir=")]
    told = [line for line in lines if ": has no effect with " in line]
    assert sorted(told) == sorted(f"{word}: has no effect with {other}" for word, other in said.items())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dims.d_model=32", "dims.d_model=32: checkpoint="),
        ("recipe.steps=4", "recipe.steps=4: checkpoint="),
        ("optimizer=adamw", "optimizer='adamw': checkpoint="),
        ("scale.vocab_size=301", "scale.vocab_size=301: checkpoint="),
    ],
)
def test_a_model_that_was_trained_otherwise_is_not_taken_for_it(with_model: Runner, word: str, said: str) -> None:
    assert with_model.error("generate", "prompt=a", word).startswith(said)
    (run,) = with_model.records()
    assert with_model.error("generate", "prompt=a", f"checkpoint={run.run_id}", word).startswith(said)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("verb", ["train", "eval", "reproduce", "bench"])
@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_a_scale_for_a_gpu_asks_before_it_takes_the_processor(
    verb: str, scale: str, stubs: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    said = error(capfd, verb, f"scale={scale}")
    assert said.startswith(f"scale={scale}: is made for a GPU, and there is none; ") and stubs == []
    if verb in ("train", "eval"):
        assert error(capfd, verb, "-m", f"scale=laptop,{scale}") == said and stubs == []
    assert cli.main([verb, f"scale={scale}", "parallel.accelerator=cpu"]) == 0
    assert stubs == [verb]


@pytest.mark.usefixtures("no_gpu")
def test_what_computes_nothing_needs_no_gpu(stubs: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for verb in ("table", "figure", "publish"):
        assert cli.main([verb, "report=table2_lm", "scale=gpu"]) == 0
    assert cli.main(["table", "report=table1_memory", "scale=paper"]) == 0
    assert stubs == ["table", "figure", "publish", "table"]
    assert error(capfd, "bench", "suite=paper").startswith("suite=paper: is made for a GPU")


def test_a_machine_with_a_gpu_is_asked_nothing(stubs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert cli.main(["reproduce", "scale=gpu"]) == cli.main(["bench", "suite=paper"]) == 0
    assert stubs == ["reproduce", "bench"]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["table", "table3"], "report=table3_passkey"),
        (["table", "tabel3_passkey"], "report=table3_passkey"),
        (["reproduce", "table4"], "report=table4_booksum"),
        (["figure", "report", "table2_lm"], "report=table2_lm"),
        (["publish", "table2_lm"], "report=table2_lm"),
        (["generate", "Once upon a time"], "prompt='Once upon a time'"),
        (["generate", "E = mc2, she said"], "prompt='E = mc2, she said'"),
        (["train", "pg19"], "task=pg19"),
        (["train", "task", "pg19"], "task=pg19"),
        (["train", "infini_lin"], "model=infini_linear"),
        (["train", "gpu"], "scale=gpu"),
        (["eval", "passkey"], "task=passkey"),
        (["bench", "decode"], "suite=decode"),
    ],
)
def test_a_word_without_a_key_is_told_its_key(line: list[str], meant: str, capfd: pytest.CaptureFixture[str]) -> None:
    word = line[1]
    assert error(capfd, *line) == f"{word!r}: not a setting; write key=value; did you mean {meant}?"


def test_a_path_with_a_space_is_told_its_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("my books", "my old books"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    said = "a value with spaces needs quotes: "
    assert error(capfd, "train", "task.data_dir=my", "books") == f"'books': {said}'task.data_dir=my books'"
    assert error(capfd, "train", "task.data_dir=my", "old", "books") == f"'old': {said}'task.data_dir=my old books'"
    # A text is no path, and may be longer than one.
    assert "not a setting" in error(capfd, "generate", f"prompt={'long ' * 100}", "word")


@pytest.mark.parametrize("line", ["train --task pg19", "train --task=pg19", "train -task pg19"])
def test_an_option_is_told_how_it_is_written(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, *line.split()).endswith("; did you mean task=pg19?")


def test_the_last_value_of_a_repeated_key_holds_and_is_reported(
    stubs: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "seed=1", "seed=2"]) == 0
    said, begins = capfd.readouterr().err.splitlines()
    assert said == "seed=1: given again as seed=2, which holds" and " seed=2: " in begins
    assert cli.main(["train", "seed=2", "seed=2"]) == 0
    assert capfd.readouterr().err.splitlines() == [begins]


@pytest.mark.parametrize("key", ["cache_dir", "task.data_dir", "variant"])
def test_an_empty_value_is_not_taken_for_none(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert error(capfd, "train", f"{key}=") == f"{key}='': is empty; give it a value, or null"


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs that `infini reproduce` would make, one entry a cell; the data of Table 2 is made up."""
    found: list[Any] = []
    record = types.SimpleNamespace(run_id="x", metric=lambda name: 1.0)

    def fill(cfg: Config, *_: Any) -> None:
        found.append((cfg.task.name, cfg.model["name"], cfg.seed))

    monkeypatch.setattr(reproduce_text, "_fill", fill)
    monkeypatch.setattr(
        reproduce_passkey, "_fill", lambda report, job, console: found.append((job.row.model, job.seed))
    )

    def system(words: list[str], *_: Any) -> Any:
        found.append(compose(words).model["name"])
        return record

    monkeypatch.setattr(reproduce_booksum, "_system", system)
    monkeypatch.setattr(reproduce.table, "show", lambda *_: 0)
    return found


def test_reproduce_makes_the_rows_of_the_models_that_are_named(cells: list[Any]) -> None:
    text = ["reproduce", "task=pg19", "task.data_dir=synthetic"]
    assert cli.main([*text, "report=table2_lm", "model=local"]) == 0
    assert cells == [("pg19", "local", 1)]
    cells.clear()
    assert cli.main([*text, "report=table2_lm", "model=infini_linear,local", "seed=1,2"]) == 0
    assert cells == [("pg19", model, seed) for seed in (1, 2) for model in ("infini_linear", "local")]
    cells.clear()
    # A row that is a model with other settings is of that model.
    assert cli.main([*text, "experiment=lm_history_scaling", "model=infini_delta"]) == 0
    assert cells == [("pg19", "infini_delta", 1)] * 2
    cells.clear()
    assert cli.main(["reproduce", "report=table3_passkey", "model=infini_delta"]) == 0
    assert cells == [("infini_delta", 1)]
    cells.clear()
    assert cli.main(["reproduce", "report=table4_booksum", "model=[bart]", "task.data_dir=synthetic"]) == 0
    assert cells == ["bart", "bart"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report=table2_lm", "model=bart"], "model=bart: report=table2_lm has no row of this model; it has rows of "),
        (["report=table2_lm", "model=local,locl"], "model='locl': must be one of autocompressor, bart, "),
        (["report=table3_passkey", "model=local"], "model=local: report=table3_passkey has rows of it that report.run"),
        (["report=table2_lm", "report.run=[local]"], "report.run=['local']: no such key of report; allowed: aggregate"),
        (["report=lr_search", "model=bart"], "model=bart: report=lr_search has no row of this model"),
        (["report=table2_lm", "seed=1,4294967296"], "seed='4294967296': must be an integer, at least 0 and below"),
        (["report=table2_lm", "seed=1,-1"], "seed='-1': must be an integer"),
        # The third row is wrong, and nothing of the first two is made.
        (["report=table2_lm", "model.rate=2", "task.data_dir=synthetic"], "model.rate=2: no such key of model"),
        (["experiment=rmt_sweep", "model=rmt", "model.memory_tokens=7", "task.data_dir=synthetic"], "model.memory_tok"),
    ],
)
def test_what_cannot_be_reproduced_is_said_before_the_first_run(
    words: list[str], said: str, cells: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert error(capfd, "reproduce", *words).startswith(said)
    assert cells == []


def test_nothing_to_make_is_no_success(
    monkeypatch: pytest.MonkeyPatch, cells: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infini.report.text_report.Report.settings_of", lambda self, row, scale, task=None: None)
    said = error(capfd, "reproduce", "report=lm_gates", "task.data_dir=synthetic")
    assert (said, cells) == ("scale=laptop: report=lm_gates has no rows at this scale", [])


def test_a_search_takes_the_models_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    searched: list[list[str]] = []
    monkeypatch.setattr("infini.runs.search.reproduce", lambda report, *_: searched.append(report.models))
    assert cli.main(["reproduce", "report=lr_search", "model=local,rmt"]) == 0
    assert searched == [["local", "rmt"]]
    shown = capfd.readouterr().out
    assert "local" in shown and "rmt" in shown and "memorizing" not in shown


def test_a_setting_that_some_rows_have_of_their_own_is_said(
    cells: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "experiment=lm_history_scaling", "task=pg19", "task.data_dir=synthetic"]
    assert cli.main([*words, "recipe.length_extension=3"]) == 0
    assert len(cells) == 5
    assert capfd.readouterr().err.count("recipe.length_extension=3: not for row ") == 2


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["report=table3_passkey", "report.run=[linear_zero_shot]"], "linear_zero_shot"),
        (["report=llm_passkey", "report.run=[base,local]"], "base"),
        (["report=llm_continual", "report.run=[full,local]", "task.data_dir=synthetic"], "full"),
        (["report=long_context"], "base"),
    ],
)
def test_a_setting_of_trainings_that_no_row_has_is_refused(
    words: list[str], row: str, cells: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for setting in ("optimizer.lr=0.5", "recipe.steps=3"):
        said = error(capfd, "reproduce", *words, setting, "plan=true")
        assert said == f"{setting}: row {row} has no training that reads it; leave it out, or choose other rows"
    # It is legal where another row has one.
    some = ["report=table3_passkey", "report.run=[linear_zero_shot,linear_finetuned]", "optimizer.lr=0.5"]
    assert cli.main(["reproduce", *some, "plan=true"]) == 0
    shown = capfd.readouterr().err
    assert shown.count("optimizer.lr=0.5: not for row linear_zero_shot, which has no training that reads it") == 1
    assert "linear_finetuned" not in shown and len(cells) == 2


def test_the_command_in_a_record_can_be_typed(infini: Runner, stubs: list[str]) -> None:
    """`infini reproduce` hands settings of its own, and of other verbs, to trainings and evaluations."""
    from infini.runs.common import start_record

    words = [*TINY, "report=table3_passkey", "report.run=all", "task=passkey", "task.examples=2", "length=1K", "seed=2"]
    words += ["logger=none", "recipe.steps=5", f"results_dir={infini.results}"]
    for verb in ("train", "eval"):
        command = start_record(verb, compose(words), words).command.split()
        assert cli.main(command[1:]) == 0
        kept = command[2:]
        assert "recipe.steps=5" in kept and "recipe.steps=3" not in kept and "task=passkey" in kept
        assert ("logger=none" in kept) == (verb == "train") and ("length=1K" in kept) == (verb == "eval")
    assert stubs == ["train", "eval"] and records.load_records(infini.results) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "train lr=0.1",
            "lr=0.1: no such key; allowed: cache_dir, dims, init_from, logger, model, optimizer, parallel, recipe, "
            "results_dir, scale, seed, task; did you mean 'optimizer.lr'?",
        ),
        ("train -m lr=0.1,0.2", "lr=0.1: no such key; allowed: cache_dir, "),
        (
            "train epochs=2",
            "epochs=2: no such key; allowed: cache_dir, dims, init_from, logger, model, optimizer, parallel, recipe, "
            "results_dir, scale, seed, task; did you mean 'recipe.steps'?",
        ),
        (
            "train learning_rate=0.1",
            "learning_rate=0.1: no such key; allowed: cache_dir, dims, init_from, logger, model, optimizer, parallel, "
            "recipe, results_dir, scale, seed, task; did you mean 'optimizer.lr'?",
        ),
        (
            "train optimizer.learning_rate=0.1",
            "optimizer.learning_rate=0.1: no such key of optimizer; allowed: betas, clip_norm, gate_lr, lr, name, "
            "weight_decay; did you mean 'optimizer.lr'?",
        ),
        (
            "train optimizer.optimiser=adamw",
            "optimizer.optimiser='adamw': no such key of optimizer; allowed: betas, clip_norm, gate_lr, lr, name, "
            "weight_decay",
        ),
        (
            "eval parallel.devices=2",
            "parallel.devices=2: infini eval does not read parallel.devices; ",
        ),
        ("generate parallel=ddp", "parallel=ddp: infini generate takes one device; leave it out"),
        (
            "inject base=a out=b segmentlength=5",
            "segmentlength=5: no such key; allowed: base, checkpoint, dtype, gate_init, input_gate, layers, "
            "memory_decay, out, results_dir, segment_length, sinks, update_rule, window; "
            "did you mean 'segment_length'?",
        ),
        ("train --steps 10", "'--steps': no such option; allowed: -m, --multirun, -h, --help; write recipe.steps=10"),
        (
            "train --batch-size=4",
            "'--batch-size=4': no such option; allowed: -m, --multirun, -h, --help; write recipe.batch_size=4",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_those_of_the_verb(
    line: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = error(capfd, *line.split())
    assert answer.startswith(said) and "did you mean 'optimizer'" not in answer


def test_the_help_of_inject_has_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The short keys, with its own defaults, and no choice that it refuses."""
    assert cli.main(["inject", "--help"]) == 0
    shown = capsys.readouterr().out
    keys = [line.split()[0] for line in shown.splitlines() if "=" in line[:30] and line.startswith("  ")][1:]
    assert keys == [
        *(
            "base=null",
            "out=null",
            "checkpoint=null",
            "results_dir=outputs/results",
            "segment_length=2048",
            "update_rule=delta",
            "gate_init=-4.0",
            "window=segment",
        ),
        *("sinks=0", "memory_decay=null", "input_gate=null", "layers=null", "dtype=null"),
    ]
    assert "Also:" not in shown and "model." not in shown


def test_a_folder_that_nothing_is_read_from_is_named(
    stubs: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infini.runs.preflight.begin_training", lambda cfg, overrides: None)
    said = "task.data_dir=no: has no effect with task.filler=block, which reads no documents"
    for more, lines in ((["task=passkey"], [said]), (["task=passkey", "task.filler=book"], []), (["task=pg19"], [])):
        assert cli.main(["train", *more, "task.data_dir=no"]) == 0
        assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inject dtype=float8", "dtype='float8': must be one of float32, bfloat16; did you mean 'float32'?"),
        ("inject update_rule=deltaa", "update_rule='deltaa': must be one of linear, delta; did you mean"),
        ("inject input_gate='null'", "input_gate='null': must be one of sigmoid, null"),
        ("inject input_gate=sigmoidd", "input_gate='sigmoidd': must be one of sigmoid, null; did you mean"),
        ("inject gate_init=nan", "gate_init=nan: must be a finite number"),
        ("inject sinks=-1", "sinks=-1: must be at least 0"),
        ("inject segment_length=0", "segment_length=0: must be at least 1"),
        ("inject dims.segment_length=0", "dims.segment_length=0: must be at least 1"),
        ("inject out=/proc/x", "out='/proc/x': /proc is not writable"),
        (
            "train task.data_dir=synthetic model=llm model.update_rule=gamma",
            "model.update_rule='gamma': must be one of linear, delta",
        ),
        (
            "train task.data_dir=synthetic model=llm model.train=lorra",
            "model.train='lorra': must be one of all, lora, gates_and_norms, gates;",
        ),
        (
            "train task.data_dir=synthetic model=llm model.lora_rank=8",
            "model.lora_rank=8: has no effect with model.train=all; leave it out",
        ),
        (
            "train task.data_dir=synthetic model=llm model.train=gates model.memory=none",
            "model.train='gates': model.memory=none has no gates",
        ),
        ("eval model=llm checkpoint=nowhere", "checkpoint='nowhere': neither a folder nor a run id below"),
        ("generate model=llm prompt=a checkpoint=nowhere", "checkpoint='nowhere': neither a folder nor a run id below"),
    ],
)
def test_options_of_a_pretrained_model_are_checked_before_it_is_read(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reading one takes up to a minute. The base is an empty folder, so whatever comes later is another error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    verb, *words = line.split()
    base = "base=empty" if verb == "inject" else "model.base=empty"
    out = [] if verb != "inject" or "out=" in line else ["out=new"]
    assert error(capfd, verb, base, *out, *words).startswith(said)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.rope_base=0", "model.rope_base=0: must be a finite number, at least 1"),
        ("model=memorizing model.neighbours=0", "model.neighbours=0: must be at least 1"),
        (
            "task=passkey model=compressive recipe.curriculum=[[63,512,1]]",
            "recipe.curriculum=[[63, 512, 1]]: rate=2: must divide segments of 63 tokens",
        ),
    ],
)
def test_what_a_model_refuses_is_said_before_its_data_are_read(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reading and tokenizing them takes minutes."""
    monkeypatch.setattr(train, "load_data_module", lambda cfg: pytest.fail("the data are read"))
    assert error(capfd, "train", "task.data_dir=synthetic", *words.split()).startswith(said)


@pytest.mark.parametrize("name", groups()["model"])
def test_every_model_passes_the_check_before_its_data_are_read(name: str) -> None:
    if kind_of(name) == "seq2seq":
        pytest.importorskip("transformers")
    train._check_model(compose([f"model={name}"]))


def test_a_model_that_reads_a_tensor_while_it_is_made_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check makes it on the meta device, whose tensors have no values."""
    monkeypatch.setattr(train, "build_model", lambda *sizes, **named: torch.zeros(2).tolist())
    train._check_model(compose([]))


def test_a_report_without_figures_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """The answer was to make runs, of which there were enough."""
    said = "report=long_context: has no figures; its table is `infini table report=long_context`"
    assert error(capfd, "figure", "report=long_context") == said
