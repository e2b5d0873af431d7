"""Composition, conversion and validation of the configuration."""

import dataclasses
import itertools
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from helpers import one_in
from hydra.errors import MissingConfigException
from hypothesis import given
from hypothesis import strategies as st
from installed import environment_of, installed_copy
from omegaconf import OmegaConf

from infini.config import compose as module
from infini.config.compose import cache_folder, compose, config_hash, config_identity, data_root, expand_sweep
from infini.config.lengths import LONGEST, parse_depths, parse_length
from infini.config.schema import (
    Config,
    DecodingConfig,
    DimsConfig,
    LoggerConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ScaleConfig,
    SuiteConfig,
    TaskConfig,
    WandbConfig,
    given_keys,
    groups,
    root_defaults,
    schema_of,
    task_schema,
)
from infini.errors import InputError
from infini.runs.evaluate import _group
from infini.tasks.passkey.config import PasskeyConfig

SCHEMAS: dict[str, Any] = {
    "task": TaskConfig,
    "dims": DimsConfig,
    "scale": ScaleConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "suite": SuiteConfig,
    "decoding": DecodingConfig,
    "recipe": RecipeConfig,
    "logger": LoggerConfig,
}
TYPED_FILES = [(group, choice) for group, choices in groups().items() if group in SCHEMAS for choice in choices]


def message(*overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        compose(list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("group", "choice"), TYPED_FILES)
def test_yaml_lists_exactly_the_fields(group: str, choice: str) -> None:
    keys = merged(group, choice)
    schema = schema_of(group, choice)
    assert issubclass(schema, SCHEMAS[group])
    assert list(keys) == [field.name for field in dataclasses.fields(schema)]


def merged(group: str, choice: str) -> dict[str, Any]:
    """The keys of a file, on top of those of the files of its own group that it builds on."""
    keys = yaml.safe_load(resources.files("infini.conf").joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8"))
    defaults = [base for base in keys.pop("defaults", []) if isinstance(base, str)]
    bases = [base.partition("@")[0] for base in defaults if base != "_self_"]
    # A file that sets another group's keys too has its own below the group's name.
    keys = keys.get(group, keys)
    found: dict[str, Any] = {}
    for base in bases:
        found |= merged(group, base)
    assert keys or bases, f"{group}/{choice}.yaml is empty"
    return found | keys


def test_every_field_is_composed_from_yaml_not_from_a_default() -> None:
    for schema in (*SCHEMAS.values(), WandbConfig, *map(task_schema, groups()["task"]), Config):
        for field in dataclasses.fields(schema):
            assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def test_root_keys_and_groups_are_the_fields_of_config() -> None:
    fields = {field.name for field in dataclasses.fields(Config)}
    assert set(root_defaults()) | (set(groups()) - {"tuned", "experiment"}) == fields


@pytest.mark.parametrize(
    ("task", "scale", "model"), one_in(7, itertools.product(groups()["task"], groups()["scale"], groups()["model"]))
)
def test_every_task_scale_and_model_composes(task: str, scale: str, model: str) -> None:
    cfg = compose([f"task={task}", f"scale={scale}", f"model={model}"])
    assert (cfg.scale.name, cfg.model["name"], cfg.recipe.name) == (scale, model, f"{task}_{scale}")


def test_a_task_without_keys_of_its_own_has_those_of_every_task() -> None:
    assert task_schema("pg19") is task_schema("no such task") is TaskConfig
    assert task_schema("passkey") is PasskeyConfig


def test_defaults() -> None:
    cfg = compose([])
    assert (cfg.task.name, cfg.model["name"], cfg.scale.name, cfg.dims.name) == (
        "pg19",
        "infini_linear",
        "laptop",
        "pg19_laptop",
    )


def test_paper_scale_is_the_papers() -> None:
    cfg = compose(["scale=paper"])
    dims = cfg.dims
    assert (dims.n_layers, dims.d_model, dims.n_heads, dims.d_key, dims.d_ff) == (12, 1024, 8, 128, 4096)
    assert dims.segment_length * cfg.recipe.segments_per_sequence == 32_768
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.recipe.warmup_steps) == ("adafactor", 0.01, 1000)
    assert (cfg.recipe.batch_size, cfg.recipe.schedule, cfg.recipe.checkpoint_activations) == (64, "cosine", True)
    assert compose(["scale=paper", "optimizer=adamw"]).optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=RMT", "model='RMT': must be one of auto.*; did you mean 'rmt'"),
        ("model=infini_liner", "model='infini_liner': must be one of auto.*; did you mean 'infini_linear'"),
        (f"decoding.top_p={'9' * 5000}", "decoding.top_p: a number of 5,000 digits is too large$"),
        (f"optimizer.lr={'9' * 400}", "optimizer.lr: a number of 400 digits is too large$"),
        ("report=table4", "report='table4': must be one of booksum_lengths, .*; did you mean 'table4_booksum'"),
        (
            "model.unlimiformer=test",
            "model.unlimiformer='test': no such key of model; .*; of model=bart, model=primera",
        ),
        ("modle=full", "modle='full': no such key; .*; did you mean 'model'"),
        ("recipe.stepz=3", "recipe.stepz=3: no such key of recipe; .*; did you mean 'recipe.steps'"),
        ("model.gates=1", "model.gates=1: no such key of model; allowed: .*gate_init"),
        ("+recipe.extra=1", "recipe.extra=1: no such key"),
        ("+extra=1", "extra=1: no such key"),
        ("seed=abc", "seed='abc': must be an integer"),
        ("seed=true", "seed=True: must be an integer"),
        ("seed=-1", "seed=-1: must be at least 0"),
        ("seed=1,2", "seed=1,2: several values for one key; add -m"),
        ("seed", "'seed': not a setting; write key=value"),
        ("seed=[1", "'seed=\\[1': cannot be parsed"),
        ("~seed", "seed: missing"),
        ("recipe.steps=0", "recipe.steps=0: must be at least 1"),
        ("recipe.steps=1.5", "recipe.steps=1.5: must be an integer"),
        ("recipe.steps=null", "recipe.steps=None: must be an integer"),
        ("recipe.warmup_steps=9999", "recipe.warmup_steps=9999: must be at most recipe.steps="),
        ("recipe.final_lr_fraction=2", "recipe.final_lr_fraction=2.0: must be between 0 and 1"),
        ("recipe.schedule=cosin", "recipe.schedule='cosin': must be one of cosine, .*; did you mean 'cosine'"),
        ("recipe.schedule=linear", "recipe.schedule='linear': must be one of cosine, constant$"),
        ("recipe.checkpoint_activations=1", "recipe.checkpoint_activations=1: must be true or false"),
        ("recipe=pg19_huge", "recipe='pg19_huge': must be one of arxiv_math_gpu, .*; did you mean 'pg19_gpu'"),
        ("dims.d_key=7", "dims.d_key=7: must be even"),
        ("dims.n_kv_heads=3", "dims.n_kv_heads=3: must divide dims.n_heads="),
        ("scale.vocab_size=10", "scale.vocab_size=10: must be 258 to 1048576"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a finite number"),
        ("optimizer.lr=0", "optimizer.lr=0.0: must be above 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas=\\[0.9\\]: must be two numbers"),
        ("parallel.precision=fp16", "parallel.precision='fp16': must be one of .*; did you mean 'bf16'"),
        ("parallel.compile=maybe", "parallel.compile='maybe': must be one of"),
        ("model.name=transformer", "model.name='transformer': must be one of .*; did you mean 'transformer_xl'"),
        ("experiment=none_such", "experiment='none_such': must be one of"),
        ("length=1X", "length='1X': must be a positive integer"),
        ("length=1G", "length='1G': must be a positive integer, .*, for example 131072, 32K or 1M$"),
        ("length=[]", "length=\\[\\]: must name at least one length"),
        ("length=[32K,1.5]", "length=1.5: must be|length: must be"),
        ("depth=centre", "depth='centre': must be start, middle, end"),
        ("depth=1.5", "depth=1.5: must be start, middle, end"),
        ("recipe.curriculum=[[128]]", "recipe.curriculum=\\[\\[128\\]\\]: stages must be"),
        ("recipe.curriculum=[[128,64]]", "recipe.curriculum=.*: stages must be"),
        ("recipe.length_extension=1", "recipe.length_extension=1.0: must be above 1"),
        ("recipe.sparse_writes=-1", "recipe.sparse_writes=-1.0: must be at least 0"),
        ("recipe.sparse_loss_scale=0", "recipe.sparse_loss_scale=0.0: must be above 0, or null"),
        ("recipe.length_extension_share=2", "recipe.length_extension_share=2.0: must be between 0 and 1"),
        ("task/pg19=x", "task/pg19='x': no such key"),
        ("suite.models=[rmt]", r"suite.models=\['rmt'\]: must include local and at least one other model"),
        (
            "suite.stream_tokens=100",
            "suite.stream_tokens=100: 0, or a multiple of suite.stream_short_tokens=32768, at least",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override: str, expected: str) -> None:
    with pytest.raises(InputError, match=f"^{expected}"):
        compose([override])
    message(override)


def test_a_group_cannot_be_left_out() -> None:
    tasks = "arxiv_math, booksum, continual, long_context, passkey, pg19"
    assert message("~task") == f"'~task': a group cannot be removed; choose one of {tasks}"


@pytest.mark.parametrize("key", ["results_dir", "cache_dir"])
def test_a_file_where_a_folder_should_be_is_named(key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    compose([f"{key}={tmp_path / 'new' / 'folder'}"])
    for folder in (file, file / "below"):
        assert message(f"{key}={folder}").startswith(f"{key}={str(folder)!r}: {file} is a file; ")


def test_a_cache_named_by_the_environment_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "file"))
    assert message().startswith(f"INFINI_CACHE_DIR={str(tmp_path / 'file')!r}: ")


@pytest.mark.parametrize(
    "words",
    [
        ["seed=2"],
        ["task=passkey", "recipe=passkey_laptop_finetune", "recipe.curriculum=[[64,128],[16,320,5]]", "recipe.steps=9"],
        ["model=llm", "model.layers=[1]", "model.base='a, b'", "model.dtype=null", "dims.segment_length=16"],
        ["report=llm_passkey", "report.run=[base]", "report.rows.base.lengths=[1K]", "report.rows.base.title=T"],
        ["experiment=llm_laptop", "model.sinks=2", "optimizer.lr=1e-3"],
        ["optimizer=adamw", "optimizer.betas=[0.1,0.2]", "seed=3", "seed=4"],
        ["hydra/launcher=basic", "parallel=ddp", "parallel.devices=2"],
        ["+model.anything=1", "results_dir=there"],
    ],
)
def test_values_set_in_a_copy_are_what_hydra_composes(words: list[str]) -> None:
    """Twice, since the joined groups are used again; and other words with the same groups are not changed by it."""
    words = module.normalise(words)
    with module._composing():
        wanted = OmegaConf.to_container(hydra.compose("config", words), resolve=True)
    for _ in range(2):
        assert OmegaConf.to_container(module._hydra_compose(words), resolve=True) == wanted
        assert module._hydra_compose(["seed=7"]).seed == 7


def test_a_recipe_nobody_wrote_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(overrides: object) -> None:
        raise MissingConfigException("In 'config': Could not find it", missing_cfg_file="recipe/pg19_lap")

    monkeypatch.setattr("infini.config.compose._hydra_compose", missing)
    said = message()
    lacks = "this task and scale have no conf/recipe/pg19_lap.yaml; add it, or set recipe to one of arxiv_math_gpu, "
    assert said.startswith(f"recipe='pg19_lap': {lacks}")
    assert ", pg19_laptop" in said


def test_rate_warms_up_peaks_and_ends_where_it_should() -> None:
    recipe = compose(["recipe.steps=100", "recipe.warmup_steps=10", "recipe.final_lr_fraction=0.1"]).recipe
    assert recipe.rate_factor(1) == pytest.approx(0.1)
    assert recipe.rate_factor(10) == pytest.approx(1.0)
    assert recipe.rate_factor(55) == pytest.approx(0.55)
    assert recipe.rate_factor(100) == pytest.approx(0.1)
    assert all(recipe.rate_factor(step) >= recipe.rate_factor(step + 1) for step in range(10, 100))
    constant = dataclasses.replace(recipe, schedule="constant", warmup_steps=0)
    assert {constant.rate_factor(step) for step in range(1, 101)} == {1.0}


def test_only_warm_up_never_divides_by_zero() -> None:
    recipe = compose(["recipe.steps=10", "recipe.warmup_steps=10"]).recipe
    assert recipe.rate_factor(10) == pytest.approx(1.0)


@pytest.mark.parametrize("path", ["/a=b/c", "/some dir/x", "/a(1)/b", "'/a=b/c'"])
def test_awkward_paths_need_no_quotes_of_hydras(path: str) -> None:
    assert compose([f"checkpoint={path}"]).checkpoint == path.strip("'")


@pytest.mark.parametrize("group", ["tuned", "experiment"])
def test_optional_groups_can_be_switched_off(group: str) -> None:
    assert compose([f"{group}=null"]).seed == 1


def test_a_key_of_another_place_is_found_there() -> None:
    assert message("steps=20").endswith("did you mean 'recipe.steps'?")
    assert message("task.examples=1").endswith("; of task=long_context, task=passkey")


def test_a_depth_may_be_a_whole_number() -> None:
    assert parse_depths(compose(["task=passkey", "depth=[0,0.5,1]"]).depth) == {"0": 0.0, "0.5": 0.5, "1": 1.0}
    assert parse_depths(compose(["task=passkey", "depth=1"]).depth) == {"1": 1.0}
    # A place has one name: its prompts would count twice.
    assert parse_depths(["start", 0, "middle", 0.5, 1, "end"]) == {"start": 0.0, "middle": 0.5, "1": 1.0}
    grid = parse_depths(["end", "grid"])
    assert grid["end"] == 1.0 and "1" not in grid and len(set(grid.values())) == len(grid)
    assert message("depth=true").startswith("depth=True: must be a string or a finite number")


def test_expand_sweep_lists_every_job() -> None:
    assert expand_sweep(["model=full,local", "seed=1,2", "checkpoint=/a=b"]) == [
        ["model=full", "seed=1", "checkpoint='/a=b'"],
        ["model=full", "seed=2", "checkpoint='/a=b'"],
        ["model=local", "seed=1", "checkpoint='/a=b'"],
        ["model=local", "seed=2", "checkpoint='/a=b'"],
    ]
    assert expand_sweep(["seed=interval(1,3)"]) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 50),
        (["recipe.steps=30"], 3),
        (["recipe.steps=300"], 30),
        (["recipe.steps=2400"], 50),
        (["recipe.steps=5"], 0),
        (["recipe.steps=30", "recipe.warmup_steps=20"], 20),
        (["task=passkey", "recipe=passkey_laptop_extended", "recipe.steps=200"], 20),
        # A tenth of these is 20 and 40: recipes stay as they are declared.
        (["task=booksum"], 20),
        (["task=passkey", "recipe=passkey_laptop_finetune"], 40),
    ],
)
def test_a_warm_up_that_is_not_set_is_at_most_a_tenth_of_the_steps_that_are(words: list[str], expected: int) -> None:
    assert compose(words).recipe.warmup_steps == expected


def of_recipe(recipe: str) -> list[str]:
    """The settings that a recipe is made for."""
    scale = next(name for name in groups()["scale"] if f"_{name}" in recipe)
    return [f"task={recipe.partition(f'_{scale}')[0]}", f"scale={scale}", f"recipe={recipe}"]


def test_a_recipe_with_steps_of_its_own_keeps_its_warm_up_and_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe may declare a warm-up that is more than a tenth of its steps."""
    for recipe in groups()["recipe"]:
        words = of_recipe(recipe)
        with monkeypatch.context() as patch:
            patch.setattr("infini.config.compose.short_warmup", lambda steps, warmup: warmup)
            as_declared = config_hash(compose(words))
        assert config_hash(compose(words)) == as_declared


def test_every_recipe_takes_any_number_of_steps() -> None:
    for recipe in groups()["recipe"]:
        assert compose([*of_recipe(recipe), "recipe.steps=1"]).recipe.steps == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decoding.top_p=1e-46", "decoding.top_p=1e-46: is 0 in float32"),
        ("decoding.temperature=1e-46", "decoding.temperature=1e-46: is 0 in float32"),
        ("optimizer.lr=1e-60", "optimizer.lr=1e-60: is 0 in float32"),
        ("optimizer.lr=1e400", "optimizer.lr=inf: must be a finite number"),
        ("optimizer.lr=1e39", "optimizer.lr=1e\\+39: must be at most 3.40282e\\+38"),
        (f"optimizer.lr={10**39}", "optimizer.lr=1e\\+39: must be at most"),
        ("optimizer.betas=[1e-50,0.9]", "optimizer.betas=1e-50: is 0 in float32"),
        ("recipe.length_extension=1e300", "recipe.length_extension=1e\\+300: must be at most"),
        ("optimizer.weight_decay=-1e-50", "optimizer.weight_decay=-1e-50: is 0 in float32"),
    ],
)
def test_a_number_that_a_run_cannot_compute_with_is_refused(override: str, expected: str) -> None:
    assert re.match(expected, message(override))


def test_numbers_of_32_bits_are_taken_to_their_ends() -> None:
    assert compose(["optimizer.lr=1.2e-38"]).optimizer.lr == 1.2e-38
    assert compose(["optimizer.weight_decay=3e38"]).optimizer.weight_decay == 3e38
    assert compose(["decoding.temperature=0", "optimizer.weight_decay=-0.0"]).decoding.temperature == 0


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("model=glob(infini*)", ["infini_delta", "infini_linear", "infini_xl"]),
        ("model=glob(*,exclude=[a*,b*,c*,i*,l*,m*,p*,r*])", ["full", "transformer_xl"]),
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("seed=choice(5,7)", ["5", "7"]),
        ("seed=sort(7,5)", ["5", "7"]),
        ("seed=tag(a,choice(5,7))", ["5", "7"]),
    ],
)
def test_sweeps_are_of_hydras_grammar(word: str, values: list[str]) -> None:
    key = word.partition("=")[0]
    assert expand_sweep([word]) == [[f"{key}={value}"] for value in values]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=glob(zz*)", "model=glob(zz*): has no values"),
        ("seed=glob(*)", "seed=glob(*): has no values"),
        ("seed=range(3,1)", "seed=range(3,1): has no values"),
        ("seed=range(1,3,0)", "seed=range(1,3,0): range() arg 3 must not be zero"),
        ("seed=range(1,1000000000000)", "10,001 jobs or more: a sweep has at most 10,000"),
    ],
)
def test_a_sweep_over_nothing_or_too_much_is_refused(word: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        expand_sweep([word])
    assert str(refused.value) == said


def test_hash_depends_on_what_decides_the_result_and_on_nothing_else() -> None:
    default = config_hash(compose([]))
    assert len(default) == 12 and int(default, 16) >= 0
    nothing = ("results_dir=elsewhere", "cache_dir=/c", "logger=none", "checkpoint=x", "scale.knockouts=false")
    for override in (*nothing, "recipe.save_every=7"):
        assert config_hash(compose([override])) == default, override
    changes = ("seed=2", "model=local", "dims.d_model=64", "recipe.steps=900", "optimizer.lr=0.1", "init_from=x")
    changed = [config_hash(compose([override])) for override in (*changes, "parallel.precision=fp32", "scale=gpu")]
    assert len({default, *changed}) == len(changed) + 1


def test_hash_does_not_depend_on_how_a_number_is_written() -> None:
    assert config_hash(compose(["optimizer.lr=1"])) == config_hash(compose(["optimizer.lr=1.0"]))


def test_a_run_from_before_an_option_existed_is_known_again() -> None:
    cfg = compose(["task=passkey", "recipe=passkey_laptop_extended", "recipe.sparse_writes=null"])
    recorded = dataclasses.asdict(cfg)
    del recorded["recipe"]["sparse_writes"]
    assert config_hash(recorded) == config_hash(cfg)
    recorded["recipe"]["sparse_writes"] = 0.1
    assert config_hash(recorded) != config_hash(cfg)


def test_length_extension_takes_three_segments() -> None:
    with pytest.raises(InputError, match="recipe.segments_per_sequence=2: must be at least 3 with recipe.length_ext"):
        compose(["task=passkey", "recipe.length_extension=10", "recipe.segments_per_sequence=2"])


def test_a_scale_of_a_penalty_that_is_off_makes_no_other_training() -> None:
    off = compose(["task=passkey", "recipe.sparse_writes=null"])
    assert off.recipe.sparse_loss_scale is None
    assert config_hash(off) == config_hash(
        compose(["task=passkey", "recipe.sparse_writes=null", "recipe.sparse_loss_scale=null"])
    )


@pytest.mark.parametrize("scale", ["laptop", "gpu", "paper"])
def test_every_passkey_recipe_has_the_penalty_of_its_rows(scale: str) -> None:
    """Those with length extension keep a constant weight, with which their published rows were trained."""
    found = {}
    for kind in ("", "_extended", "_plain", "_finetune", "_updates"):
        if (name := f"passkey_{scale}{kind}") in groups()["recipe"]:
            recipe = compose(["task=passkey", f"scale={scale}", f"recipe={name}"]).recipe
            found[kind] = (recipe.sparse_writes, recipe.sparse_loss_scale)
    expected = {"": (0.03, 0.05), "_extended": (0.03, None), "_plain": (None, None), "_finetune": (None, None)}
    assert found == expected | ({"_updates": (0.03, None)} if scale == "laptop" else {})


def test_a_recipe_with_a_rate_of_its_own_leaves_the_other_recipes_theirs_and_the_command_line_the_last_word() -> None:
    extended = ["task=passkey", "recipe=passkey_laptop_extended"]
    assert (compose(extended).optimizer.name, compose(extended).optimizer.lr) == ("muon", 0.004)
    assert compose(extended).recipe.advance_below == compose(["task=passkey"]).recipe.advance_below
    assert compose(["task=passkey"]).optimizer.lr == 0.01
    assert compose([*extended, "optimizer.lr=0.02"]).optimizer.lr == 0.02
    assert compose([*extended, "scale=gpu", "recipe=passkey_gpu_extended"]).recipe.name == "passkey_gpu_extended"


def test_an_option_that_a_checkpoint_did_not_know_was_off() -> None:
    held = dataclasses.asdict(compose(["task=passkey"]).recipe)
    assert held.pop("sparse_loss_scale")
    assert _group(RecipeConfig, held).sparse_loss_scale is None
    # An option that does not exist any more changes nothing if it was off, and cannot be ignored if it was on.
    assert _group(RecipeConfig, held | {"loss_temperature": None}).steps == held["steps"]
    with pytest.raises(TypeError, match="loss_temperature"):
        _group(RecipeConfig, held | {"loss_temperature": 4.0})
    del held["steps"]
    with pytest.raises(TypeError, match="steps"):
        _group(RecipeConfig, held)


def test_identity_is_plain_json() -> None:
    identity = config_identity(compose([]))
    assert set(identity) == {
        "task",
        "model",
        "dims",
        "scale",
        "optimizer",
        "parallel",
        "recipe",
        "seed",
    }
    assert config_identity(compose(["init_from=x"]))["init_from"] == "x"
    assert identity["parallel"] == {"precision": "auto"}


@given(st.integers(1, 10**9), st.sampled_from([("", 1), ("K", 1024), ("M", 1024**2)]))
def test_parse_length_multiplies(number: int, unit: tuple[str, int]) -> None:
    letter, factor = unit
    if number * factor > LONGEST:
        with pytest.raises(InputError, match="^length='.*': must be at most 1048576M tokens$"):
            parse_length(f"{number}{letter}")
    else:
        assert parse_length(f"{number}{letter}") == number * factor


@given(st.text(max_size=8))
def test_parse_length_accepts_or_explains(text: str) -> None:
    try:
        assert parse_length(text) > 0
    except InputError as error:
        assert "must be a positive integer" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5K", "32kb", "1e6", "1_000", " 8", "K", "8KK", "٣", "1G", "9" * 5000]
)
def test_parse_length_refuses(text: str) -> None:
    with pytest.raises(InputError, match="^length="):
        parse_length(text)


def test_parse_length_examples() -> None:
    assert (parse_length("32K"), parse_length("1M"), parse_length("7"), parse_length(7)) == (32_768, 1_048_576, 7, 7)
    assert (parse_length("32k"), parse_length("1m")) == (32_768, 1_048_576)
    for wrong in (True, 1.5, None):
        with pytest.raises(InputError):
            parse_length(wrong)  # type: ignore[arg-type]


def test_lengths_and_depths_may_be_one_or_several() -> None:
    assert compose(["length=1M"]).length == ["1M"]
    assert compose(["length=[32K,4096]", "depth=[start,0.25]"]).length == ["32K", 4096]
    assert parse_depths(["start", 0.25, "end"]) == {"start": 0.0, "0.25": 0.25, "end": 1.0}
    grid = parse_depths(["grid"])
    assert len(grid) == 21 and (min(grid.values()), max(grid.values())) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("depths", "said"),
    [
        ("[0.3333333,0.33333334]", "depth=0.3333333, 0.33333334: equal after rounding to 0.333333; give one"),
        ("[grid,0.050000001]", "depth=0.05, 0.050000001: equal after rounding to 0.05; give one"),
    ],
)
def test_two_depths_of_one_name_are_refused(depths: str, said: str) -> None:
    """One would be left out. Two words for one depth are one."""
    with pytest.raises(InputError) as error:
        compose([f"depth={depths}"])
    assert str(error.value) == said
    assert parse_depths(["middle", 0.5, "grid", 0.05])["middle"] == 0.5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task.digits=1", "task.digits=1: must be at least 2"),
        ("task.fill=some", "task.fill='some': must be one of blocks, exact"),
        ("task.carry_state=true", "task.carry_state=True: must be false"),
        ("task.digit=4", "task.digit=4: no such key of task; .*; did you mean 'task.digits'"),
    ],
)
def test_what_is_wrong_with_a_passkey_is_said_in_one_line(override: str, expected: str) -> None:
    with pytest.raises(InputError, match=f"^{expected}"):
        compose(["task=passkey", override])


@pytest.mark.parametrize("typed", ["books/", "./books", "books/.", "books//"])
def test_a_folder_typed_otherwise_is_the_same_training(typed: str) -> None:
    """Shells complete folders in these ways; a stopped training must resume."""
    assert config_hash(compose([f"task.data_dir={typed}"])) == config_hash(compose(["task.data_dir=books"]))


@pytest.mark.parametrize("typed", ["synthetic/", "./synthetic", "link/../books"])
def test_a_folder_stays_the_one_that_was_typed(typed: str) -> None:
    """Not made-up text, which `synthetic` is, and not the folder beside the target of a link."""
    assert compose([f"task.data_dir={typed}"]).task.data_dir == typed


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = compose([])
    monkeypatch.delenv("INFINI_DATA_DIR", raising=False)
    assert data_root(cfg.task) is None
    monkeypatch.setenv("INFINI_DATA_DIR", str(tmp_path))
    assert data_root(cfg.task) == tmp_path / "pg19"
    assert data_root(dataclasses.replace(cfg.task, data_dir="/books")) == Path("/books")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    assert cache_folder(cfg, create=False) == tmp_path
    assert cache_folder(dataclasses.replace(cfg, cache_dir="/c"), create=False) == Path("/c")
    monkeypatch.delenv("INFINI_CACHE_DIR")
    assert cache_folder(cfg, create=False) == Path.home() / ".cache" / "infini"


def test_a_penalty_on_gated_writes_is_not_for_weights_in_parts() -> None:
    words = ["task=passkey", "model=llm", "model.input_gate=sigmoid", "recipe.sparse_writes=0.1", "parallel=fsdp2"]
    with pytest.raises(InputError, match="recipe.sparse_writes=0.1: must be null with model.input_gate and parallel="):
        compose(words)
    for other in ("parallel=ddp", "model.input_gate=null", "recipe.sparse_writes=null"):
        changed = [word for word in words if word.partition("=")[0] != other.partition("=")[0]]
        more = ["recipe.sparse_loss_scale=null"] if other == "recipe.sparse_writes=null" else []
        assert compose([*changed, other, *more]).parallel.name in ("ddp", "fsdp2")


@pytest.mark.parametrize(
    ("text", "line"), [('name: mine\ntitle: "x\nsplit: test\n', 2), ("name: mine\n\t- a\n", 2)], ids=["quote", "tab"]
)
def test_a_yaml_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, line: int) -> None:
    """Whether it is chosen, or read because it may declare claims."""
    copy = installed_copy(Path(__file__).resolve().parents[2], tmp_path)
    broken = copy / "infini" / "conf" / "report" / "mine.yaml"
    broken.write_text(text, encoding="utf-8")
    for report in ("mine", "claims"):
        call = [sys.executable, "-m", "infini", "table", f"report={report}", f"results_dir={tmp_path / 'results'}"]
        done = subprocess.run(call, cwd=copy, env=environment_of(copy), capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        # The two libraries that read it notice it at different lines.
        assert re.fullmatch(rf"infini: error: {re.escape(str(broken))}, line [{line}-4]: not YAML: .+\n", done.stderr)


@pytest.mark.parametrize("group", ["dims", "recipe"])
def test_a_task_without_sizes_or_a_recipe_for_a_scale_says_which_file_it_lacks(
    monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Nobody typed the name, so no name that is like it is meant."""

    def lacks(overrides: tuple[str, ...]) -> bytes:
        raise MissingConfigException("not found", missing_cfg_file=f"{group}/notes_gpu")

    monkeypatch.setattr("infini.config.compose._joined_groups", lacks)
    with pytest.raises(InputError) as caught:
        compose(["task=pg19", "scale=gpu"])
    said = f"{group}='notes_gpu': this task and scale have no conf/{group}/notes_gpu.yaml; add it, or set {group} to "
    assert str(caught.value).startswith(f"{said}one of ") and "did you mean" not in str(caught.value)
    with pytest.raises(InputError, match=f"{group}='notes_gpu': must be one of .*"):
        compose(["task=pg19", f"{group}=pg19_gpu"])


def test_the_keys_of_an_experiment_are_given_by_its_name() -> None:
    """Also those of the experiment that it begins with, and the groups that it chooses."""
    keys = given_keys(["experiment=llm_as_in_paper", "optimizer.lr=1", "+task.x=1", "~recipe.y", "word"])
    assert {"experiment", "optimizer.lr", "task.x", "recipe.y", "model", "task", "model.train"} <= keys
    # Of llm_laptop, with which it begins.
    assert "dims.segment_length" in keys and "_self_" not in keys
    assert given_keys(["model=llm"]) == {"model"}


@pytest.mark.parametrize("chosen", ["muon", "adafactor"])
def test_an_optimizer_beside_an_experiment_that_has_one_is_refused(chosen: str) -> None:
    """The experiment's was taken without a word, with what it does not set from the chosen one."""
    said = f"^optimizer='{chosen}': optimizer.name=adamw is set, too, here or by the experiment; leave one of them out"
    for other in ("experiment=llm_laptop", "optimizer.name=adamw"):
        with pytest.raises(InputError, match=said):
            compose([other, f"optimizer={chosen}"])
    assert compose(["experiment=llm_laptop", "optimizer=adamw"]).optimizer.name == "adamw"


def test_a_recipe_or_sizes_beside_an_experiment_that_sets_their_keys_are_refused() -> None:
    """The experiment's values were taken without a word, with what it does not set from the chosen ones."""
    said = (
        "^recipe='pg19_laptop': experiment=llm_laptop sets recipe.batch_size, recipe.excerpt_tokens, "
        "recipe.segments_per_sequence, recipe.steps itself; set single keys of recipe beside it, or leave "
        "one of the two out$"
    )
    with pytest.raises(InputError, match=said):
        compose(["experiment=llm_laptop", "recipe=pg19_laptop"])
    # Also what comes from the experiment with which another one begins.
    with pytest.raises(InputError, match="^dims='pg19_laptop': experiment=llm_as_in_paper sets dims.segment_length "):
        compose(["dims=pg19_laptop", "experiment=llm_as_in_paper"])


def test_a_recipe_beside_an_experiment_whose_keys_do_not_differ_is_taken() -> None:
    words = ["experiment=llm_find_keys", "recipe=passkey_laptop_finetune"]
    assert compose(words) == compose(words[:1])
    keys = ["recipe.batch_size=4", "recipe.segments_per_sequence=4", "recipe.steps=9", "recipe.excerpt_tokens=32768"]
    cfg = compose(["experiment=llm_laptop", "recipe=pg19_laptop", *keys])
    assert (cfg.recipe.name, cfg.recipe.steps) == ("pg19_laptop", 9)
    assert compose(["experiment=rmt_sweep", "recipe=pg19_gpu"]).recipe == compose(["recipe=pg19_gpu"]).recipe
