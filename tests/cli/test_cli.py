"""The command line: help without torch, one line for every mistake, sweeps, and the frozen surface."""

import contextlib
import dataclasses
import errno
import importlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import one_in
from report_runs import make_train

from infini import records
from infini.cli import main as cli
from infini.commands import verbs
from infini.config.compose import compose
from infini.config.schema import Config, groups
from infini.errors import InputError

Call = tuple[Config, list[str], dict[str, Any], list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Call]:
    """Commands that only write down how they were called, in a working directory of their own."""
    seen: list[Call] = []

    def run(cfg: Config, overrides: list[str], **extra: Any) -> int | None:
        seen.append((cfg, overrides, extra, list(sys.argv)))
        compose([f"seed={cfg.seed + 1}"])
        if cfg.seed == 13:
            raise InputError("bad luck")
        return 3 if cfg.seed == 33 else None

    for verb in verbs().values():
        module = types.ModuleType(verb.module)
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, verb.module, module)
    # These checks and messages come before the work of a training.
    monkeypatch.setattr("infini.runs.preflight.begin_training", lambda cfg, overrides: None)
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.fixture
def recorded(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The same, and each training that succeeds writes a record and a model."""
    run = sys.modules["infini.runs.train"].run

    def recording(cfg: Config, overrides: list[str]) -> int | None:
        if not (code := run(cfg, overrides)):
            made = make_train(cfg.model["name"], cfg.seed, config=dataclasses.asdict(cfg), data={})
            records.write_record(made, cfg.results_dir)
            (Path(cfg.results_dir) / "checkpoints" / made.run_id).mkdir(parents=True, exist_ok=True)
        return code

    monkeypatch.setattr(sys.modules["infini.runs.train"], "run", recording)
    return calls


def run_cli(root: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "cli.py"), *arguments]
    return subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "checkpoint=x"],
            "checkpoint=x: infini train does not read checkpoint; verbs that do: eval, generate",
        ),
        (["train", "prompt=a b"], "infini train does not read prompt; verbs that do: generate"),
        (["train", "task=passkey", "length=1K"], "infini train does not read length; verbs that do: eval, reproduce"),
        (["train", "task=passkey", "depth=start"], "infini train does not read depth; verbs that do: eval, reproduce"),
        (["eval", "length=2K"], "task=pg19 does not read it; add task=booksum or task=long_context or task=passkey"),
        (["eval", "task=booksum", "depth=start"], "task=booksum does not read it; add task=passkey"),
        (["table", "report=table3_passkey", "seed=9"], "seed=9: infini table takes the runs of every seed"),
        (["figure", "seed=9"], "seed=9: infini figure takes the runs of every seed"),
        (["publish", "report=table3_passkey", "seed=9"], "seed=9: infini publish takes the runs of every seed"),
        (["train", "parallel.strategy=foo", "task.data_dir=synthetic"], "parallel.strategy='foo': must be one of auto"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main([*words, f"results_dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_frozen_surface() -> None:
    """Users type these words: changing them is a decision."""
    assert list(verbs()) == [
        "train",
        "eval",
        "generate",
        "summarize",
        "table",
        "figure",
        "reproduce",
        "publish",
        "bench",
        "inject",
        "demo",
    ]
    assert [field.name for field in dataclasses.fields(Config)] == [
        "task",
        "model",
        "dims",
        "scale",
        "optimizer",
        "parallel",
        "recipe",
        "report",
        "logger",
        "suite",
        "decoding",
        "variant",
        "seed",
        "checkpoint",
        "init_from",
        "length",
        "depth",
        "part",
        "prompt",
        "save_state",
        "load_state",
        "output",
        "base",
        "out",
        "key",
        "place",
        "full",
        "plan",
        "workers",
        "results_dir",
        "cache_dir",
    ]


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_a_command(verb: str) -> None:
    assert callable(importlib.import_module(verbs()[verb].module).run)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["train", "--help"], ["table", "-h"]])
def test_help_is_quick_and_imports_no_torch(arguments: list[str], project_root: Path) -> None:
    code = (
        f"import sys, cli; code = cli.main({arguments!r}); "
        "heavy = {'torch', 'lightning', 'datasets', 'wandb', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    # Seconds of the processor: other tests that run at the same time take their share of the clock.
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, timeout=60)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


@pytest.mark.parametrize("words", [["help", "train", "nonsense"], ["train", "nonsense", "--help"]])
def test_help_refuses_a_word_that_is_no_setting(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It showed the help as if the word were not there; `infini help train task passkey` had another task's keys."""
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err == "infini: error: 'nonsense': not a setting; write key=value\n"


def test_help_of_a_verb_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["help", "train"]) == 0
    assert capsys.readouterr().out == expected
    assert cli.main(["help", "completion"]) == 0
    assert "bash" in capsys.readouterr().out
    assert cli.main(["help", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["table", "figure", "publish", "reproduce"])
def test_an_experiment_is_named_where_a_report_is(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    said = "experiment=null: a report, or a training, with the settings that it needs.\n    llm_1b_passkey    "
    assert said in capsys.readouterr().out


def test_a_table_of_an_experiment_is_that_of_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tables = []
    for group in ("report", "experiment"):
        assert cli.main(["table", f"{group}=rmt_sweep", f"results_dir={tmp_path}"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "RMT" in tables[0]


def test_overview_lists_every_verb_with_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for name, verb in verbs().items():
        assert name in shown and verb.example in shown


def test_examples_compose() -> None:
    for name, verb in verbs().items():
        words = verb.example.split()
        assert words[:2] == ["infini", name]
        compose([word for word in words[2:] if "=" in word and not word.startswith("seed=")])


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str], project_root: Path) -> None:
    assert cli.main(["--version"]) == 0
    stated = tomllib.loads((project_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert capsys.readouterr().out == f"infini {stated}\n"


def test_help_of_a_verb_lists_groups_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("infini_delta", "paper_12l", "adafactor", "pg19_laptop", "results_dir", "outputs/results"):
        assert word in shown


@pytest.mark.parametrize("verb", verbs())
def test_help_of_a_verb_explains_every_key_of_its_groups(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    cfg = dataclasses.asdict(compose(verbs()[verb].fixed_settings))
    in_groups, at_root = verbs()[verb].groups, verbs()[verb].keys
    short = {whole: key for key, whole in verbs()[verb].aliases.items()}
    keys = [*at_root, *(f"{group}.{key}" for group in in_groups if group != "report" for key in cfg[group]), *short]
    for key in keys:
        if key.endswith((".name", ".kind")):
            continue
        if not verbs()[verb].reads(key):
            assert not [line for line in lines if line.startswith(f"  {key}=")]
            continue
        check_meaning(lines, short.get(key, key))


def check_meaning(lines: list[str], key: str) -> None:
    """Lines of help say something of a key, beside it or below it."""
    (number,) = [number for number, line in enumerate(lines) if line.startswith(f"  {key}=")]
    rest = lines[number].strip().partition("  ")[2] or lines[number + 1].strip()
    assert len(rest.split()) >= 2 and "=" not in rest.split()[0], f"{key} has no meaning: {rest!r}"


@pytest.mark.parametrize("model", groups()["model"])
def test_help_explains_every_option_of_every_model(
    model: str, capsys: pytest.CaptureFixture[str], project_root: Path
) -> None:
    """By the comments in its YAML."""
    options = yaml.safe_load((project_root / "conf" / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
    assert options.pop("name") == model and options
    assert cli.main(["train", f"model={model}", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for key in options:
        check_meaning(lines, f"model.{key}")


@pytest.mark.parametrize("group", ["task", "model", "scale", "report", "suite", "experiment"])
def test_help_says_what_every_choice_of_a_group_is(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench" if group == "suite" else "reproduce", "--help"]) == 0
    (section,) = [part for part in capsys.readouterr().out.split("\n\n") if part.startswith(f"{group}=")]
    for choice in groups()[group]:
        (meaning,) = re.findall(rf"^    {choice}\s{{2,}}(.+)", section, re.MULTILINE)
        assert len(meaning.split()) >= 3, choice


def test_help_shows_what_is_taken_where_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["figure", "--help"]) == 0
    assert "report=every one: " in capsys.readouterr().out
    assert cli.main(["figure", "report=lm_gates", "--help"]) == 0
    assert "report=lm_gates: " in capsys.readouterr().out
    # The sizes and the tokenizer of a pretrained model are its own.
    for words, segment in (([], 2048), (["dims.segment_length=512"], 512)):
        assert cli.main(["train", "task=continual", "model=llm", *words, "--help"]) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"  dims\.(\w+=\d+) ", shown) == [f"segment_length={segment}"]
        assert "  scale.tokenizer=" not in shown and "  scale.vocab_size=" not in shown


def test_help_shows_the_defaults_of_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "task=passkey", "recipe.steps=777", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "recipe=passkey_laptop:" in shown and "recipe.steps=777 " in shown and "task.few_digit_share=0.8" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "'trian': no such verb; allowed: .*; did you mean 'train'"),
        (["train", "modle=full"], "modle='full': no such key; .*did you mean 'model'"),
        (["train", "model=locl"], "model='locl': must be one of .*; did you mean 'local'"),
        (["train", "recipe.steps=0"], "recipe.steps=0: must be at least 1"),
        (["train", "full"], "'full': not a setting; write key=value"),
        (["train", "@=0"], "'@=0': not a setting; write key=value"),
        (["train", "+@x=a"], "'\\+@x=a': not a setting; write key=value"),
        (["train", "~@=0"], "'~@=0': not a setting; write key=value"),
        (["train", "-m", "@=0"], "'@=0': not a setting; write key=value"),
        (["train", "--fast"], "'--fast': no such option"),
        (["train", "seed=1,2"], "seed=1,2: several values for one key; add -m"),
        (["train", "-m", "seed=1,x"], "seed='x': must be an integer"),
        (["train", "-m", "model=full,locl"], "model='locl': must be one of .*; did you mean 'local'"),
        (
            ["train", "-m", "hydra/launcher=none_such"],
            "In 'hydra/config': Could not find 'hydra/launcher/none_such'; joblib and submitit come with the extra `cl",
        ),
        (["train", "hydra/launcher=0"], "hydra/launcher=0: takes the name of one of Hydra's configurations"),
        (["train", "-m", "hydra/launcher=0"], "hydra/launcher=0: takes the name of one of Hydra's configurations"),
        (["train", "hydra/launcher=[a,1]"], "hydra/launcher=.*: takes the name of one of Hydra's configurations"),
        (["train", "~hydra/launcher=0"], "~hydra/launcher=0: takes the name of one of Hydra's configurations"),
        (["table", "-m", "seed=1,2"], "table -m: no sweeps over this verb"),
        (
            ["train", "-m", "optimizer.lr=interval (0.1,0.2)"],
            "optimizer.lr=interval \\(0.1,0.2\\): an interval needs a hydra/sweeper",
        ),
        (
            ["train", "-m", "seed=interval(1,3)"],
            "seed=interval\\(1,3\\): an interval needs a hydra/sweeper",
        ),
        (["train", "-m", "seed=range(2,1)"], "seed=range\\(2,1\\): has no values"),
        (["train", "-m", "model=glob(zz*)"], "model=glob\\(zz\\*\\): has no values"),
        (["train", "hydra/launcher=basic"], "hydra/launcher=basic: Hydra runs sweeps alone; add -m"),
        (["reproduce", "seed=1,4294967296"], "seed='4294967296': must be an integer, at least 0 and below 2\\*\\*32"),
        (["reproduce", "seed=1,x"], "seed='x': must be an integer"),
        (["publish", "some_run", "modle=full"], "modle='full': no such key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], expected: str, calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert re.match(f"infini: error: {expected}", shown.err), shown.err
    assert calls == []


def test_a_mistake_shows_no_traceback_in_a_process_of_its_own(project_root: Path, tmp_path: Path) -> None:
    done = run_cli(project_root, "table", "report=table3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("infini: error: report='table3'") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_input_error_of_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "seed=13"]) == 2
    assert capsys.readouterr().err == "infini: error: bad luck\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "resumes from the last checkpoint of this training, or starts it where there is none\n"),
        (["eval"], "results so far are kept, and the same command resumes after them\n"),
        (["figure"], "figures drawn so far are complete, and the same command draws all of them again\n"),
        (["bench"], "nothing is recorded of the interrupted measurement, and the same command repeats it\n"),
        (["table"], "the same command starts from the beginning\n"),
        (["train", "-m", "seed=1,2"], "where there is none; finished jobs are skipped\n"),
    ],
)
def test_an_interrupted_command_says_what_a_restart_does(
    arguments: list[str],
    said: str,
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(cfg: Config, overrides: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[verbs()[arguments[0]].module], "run", interrupted)
    assert cli.main(arguments) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("infini: interrupted; ") and shown.endswith(said) and shown.count("\n") == 1


def test_ctrl_c_is_one_line_if_a_library_fails_to_clean_up(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(cfg: Config, overrides: list[str]) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            # omegaconf's flag_override raises this while a configuration is composed.
            raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")

    monkeypatch.setattr(sys.modules[verbs()["eval"].module], "run", interrupted)
    assert cli.main(["eval"]) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("infini: interrupted; results so far are kept") and shown.count("\n") == 1


def test_ctrl_c_while_modules_are_imported_shows_no_traceback(project_root: Path, tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt\n")
    for start in (["-m", "infini"], [str(project_root / "cli.py")]):
        stopped = subprocess.run(
            [sys.executable, *start, "table"],
            cwd=project_root,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["train"], ["train", "-m", "seed=1,2"]])
def test_a_full_disk_is_one_line_in_a_sweep_too(
    arguments: list[str], calls: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(cfg: Config, overrides: list[str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(sys.modules["infini.runs.train"], "run", full)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("infini: error: ") and shown.count("\n") == 1
    assert shown.endswith("model.safetensors: No space left on device; existing files are unchanged\n")


@pytest.mark.parametrize("arguments", one_in(3, (["table"], ["--help"], ["table", "report=lr_search", "--help"])))
def test_a_reader_that_has_enough_is_no_error(arguments: list[str], project_root: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(project_root / "cli.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("terminal", "said"), [(True, "loading torch and lightning"), (False, "")])
def test_slow_imports_are_announced_on_a_terminal_alone(
    terminal: bool, said: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["train"]) == 0 and len(calls) == 1
    assert said in stream.getvalue() and bool(said) == bool(stream.getvalue())


def test_a_command_gets_its_config_overrides_and_its_code_is_returned(calls: list[Call]) -> None:
    assert cli.main(["train", "model=local", "seed=33"]) == 3
    ((cfg, overrides, extra, _),) = calls
    assert (cfg.model["name"], cfg.seed, overrides, extra) == ("local", 33, ["model=local", "seed=33"], {})


@pytest.mark.parametrize(
    ("words", "seeds"), [([], [1]), (["seed=7"], [7]), (["seed=1,2,3"], [1, 2, 3]), (["seed=[4,5]"], [4, 5])]
)
def test_reproduce_takes_several_seeds(words: list[str], seeds: list[int], calls: list[Call]) -> None:
    assert cli.main(["reproduce", "scale=gpu", "parallel.accelerator=cpu", *words]) == 0
    ((cfg, overrides, extra, _),) = calls
    assert (extra, cfg.seed, overrides) == ({"seeds": seeds}, seeds[0], ["scale=gpu", "parallel.accelerator=cpu"])


def test_publish_takes_run_ids(calls: list[Call]) -> None:
    assert cli.main(["publish", "run-1", "results_dir=here", "run-2"]) == 0
    ((cfg, overrides, extra, _),) = calls
    assert (extra, overrides, cfg.results_dir) == ({"ids": ["run-1", "run-2"]}, ["results_dir=here"], "here")


def test_sweep_runs_every_combination(calls: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["infini", "train", "-m", "model=local,full", "seed=1,2"])
    assert cli.main() == 0
    assert [(cfg.model["name"], cfg.seed) for cfg, *_ in calls] == [
        ("local", 1),
        ("local", 2),
        ("full", 1),
        ("full", 2),
    ]
    for cfg, overrides, _, argv in calls:
        assert overrides == [f"model={cfg.model['name']}", f"seed={cfg.seed}"]
        # Lightning starts further processes with this line: it must be the job's own.
        assert argv == ["infini", "train", *overrides]
    assert sys.argv[2] == "-m"
    assert Path.cwd() == tmp_path
    assert [entry.name for entry in tmp_path.iterdir()] == ["outputs"]


def test_a_models_options_are_checked_before_the_first_job(
    calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of them could otherwise fail after hours."""
    for words, said in (
        ("model=infini_delta model.gate_init=zeros,halves", "model.gate_init='halves': must be one of"),
        ("model=local,llm model.base=nowhere model.train=gates,all model.memory=none", "model.base"),
        ("model=llm model.train=all,gates model.memory=none", "model.train='gates': model.memory=none has no gates"),
    ):
        assert cli.main(["train", "-m", *words.split()]) == cli.USAGE_ERROR
        assert f"infini: error: {said}" in capsys.readouterr().err
    assert not calls


def test_a_sweep_takes_the_choices_of_a_group_by_a_pattern(calls: list[Call]) -> None:
    assert cli.main(["train", "-m", "model=glob(infini*)"]) == 0
    assert [cfg.model["name"] for cfg, *_ in calls] == ["infini_delta", "infini_linear", "infini_xl"]


def test_a_job_of_a_sweep_has_a_short_warm_up_too(calls: list[Call]) -> None:
    assert cli.main(["train", "-m", "recipe.steps=30,300"]) == 0
    assert [cfg.recipe.warmup_steps for cfg, *_ in calls] == [3, 30]


def test_a_failed_job_does_not_stop_the_others(calls: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-m", "seed=13,33,5"]) == 2
    assert [cfg.seed for cfg, *_ in calls] == [13, 33, 5]
    assert capsys.readouterr().err == "infini: error: 2 of 3 jobs failed; the first, seed=13: bad luck\n"


def test_a_sweep_that_was_stopped_goes_on_with_the_jobs_that_are_not_done(
    recorded: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sys.modules["infini.runs.train"].run

    def stopped(cfg: Config, overrides: list[str]) -> int | None:
        if cfg.seed == 3:
            raise KeyboardInterrupt
        return run(cfg, overrides)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["infini.runs.train"], "run", stopped)
        assert cli.main(["train", "-m", "seed=1,2,3,4"]) == cli.INTERRUPTED
    assert cli.main(["train", "-m", "seed=1,2,3,4"]) == 0
    assert "infini train seed=2: done before\n" in capsys.readouterr().out
    assert [cfg.seed for cfg, *_ in recorded] == [1, 2, 3, 4]
    # Another sweep has jobs of its own; one that came to its end may be run again.
    assert not list((tmp_path / "outputs").glob("**/sweep-*"))
    assert cli.main(["train", "-m", "seed=1,2"]) == 0
    assert [cfg.seed for cfg, *_ in recorded] == [1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_job_that_a_signal_stops_after_its_record_is_done(
    stop: type[BaseException], recorded: list[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """submitit's handler of the signal, which queues the job again, ends the process by SystemExit."""
    run = sys.modules["infini.runs.train"].run

    def stopped(cfg: Config, overrides: list[str]) -> int | None:
        code: int | None = run(cfg, overrides)
        if cfg.seed == 2:
            raise stop
        return code

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["infini.runs.train"], "run", stopped)
        with contextlib.suppress(SystemExit):
            assert cli.main(["train", "-m", "seed=1,2,3"]) == cli.INTERRUPTED
    assert cli.main(["train", "-m", "seed=1,2,3"]) == 0
    assert "infini train seed=2: done before\n" in capsys.readouterr().out
    assert [cfg.seed for cfg, *_ in recorded] == [1, 2, 3]


def test_a_sweep_that_ends_takes_no_other_process_of_it_down(
    recorded: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other process removes the marks of finished jobs when this one is about to read one."""
    run, read_text = sys.modules["infini.runs.train"].run, Path.read_text

    def stopped(cfg: Config, overrides: list[str]) -> int | None:
        if cfg.seed == 2:
            raise KeyboardInterrupt
        return run(cfg, overrides)

    def too_late(path: Path, *args: Any, **options: Any) -> str:
        if "sweep-" in str(path):
            shutil.rmtree(path.parent, ignore_errors=True)
        return read_text(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["infini.runs.train"], "run", stopped)
        assert cli.main(["train", "-m", "seed=1,2"]) == cli.INTERRUPTED
    assert list((tmp_path / "outputs").glob("**/sweep-*/*"))
    monkeypatch.setattr(Path, "read_text", too_late)
    assert cli.main(["train", "-m", "seed=1,2"]) == 0
    assert [cfg.seed for cfg, *_ in recorded] == [1, 1, 2]


def test_a_sweep_started_again_runs_what_failed(recorded: list[Call]) -> None:
    assert cli.main(["train", "-m", "seed=1,13"]) == 2
    assert cli.main(["train", "-m", "seed=1,13"]) == 2
    assert [cfg.seed for cfg, *_ in recorded] == [1, 13, 13]


def test_a_defect_of_ours_keeps_its_traceback(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cfg: Config, overrides: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["infini.runs.train"], "run", broken)
    for arguments in (["train"], ["train", "-m", "seed=1,2"]):
        with pytest.raises(ZeroDivisionError):
            cli.main(arguments)
