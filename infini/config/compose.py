"""Configuration: composed by Hydra from `conf/`, then converted to the dataclasses of `infini.config.schema`.

A user's mistake is an `InputError` of one line: `<key>=<value!r>: <what is allowed>`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from infini.config.schema import (
    LISTS,
    OPTIONAL_GROUPS,
    Config,
    TaskConfig,
    evaluation_keys,
    given_keys,
    groups,
    no_yaml,
    one_of,
    require,
    root_defaults,
)
from infini.config.typed import build, no_such_key
from infini.errors import InputError, first_line
from infini.system.paths import home_expanded

MAX_JOBS = 10_000
"""Most jobs of a sweep."""


def load(cfg: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The typed configuration of a composed one. overrides: what it was composed with, in Hydra's grammar.

    Raises InputError for an unknown or missing key, and a value of the wrong type or out of range.
    """
    try:
        composed = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(first_line(error)) from error
    values = {str(key): value for key, value in dict(composed).items()}  # type: ignore[arg-type]
    # One length or depth becomes a list of one, so that `length=1M` works, also in a sweep.
    values |= {key: [values[key]] for key in LISTS if key in values and not isinstance(values[key], list)}
    recipe, set_here = values.get("recipe"), {text.lstrip("+").partition("=")[0] for text in overrides}
    if isinstance(recipe, Mapping) and "recipe.steps" in set_here and "recipe.warmup_steps" not in set_here:
        # Otherwise a shorter training could consist of warm-up alone. A recipe with its own steps is unchanged.
        steps, warmup = recipe.get("steps"), recipe.get("warmup_steps")
        if type(steps) is int and type(warmup) is int and steps >= 1:
            values["recipe"] = {**recipe, "warmup_steps": short_warmup(steps, warmup)}
    made = build(Config, values)
    if made.results_dir.startswith("~"):
        made.results_dir = str(home_expanded("results_dir", made.results_dir))
    _check_folder("results_dir", Path(made.results_dir))
    try:
        cache_folder(made, create=False)
    except InputError:
        # Without a home folder only commands that use the cache fail.
        has_home = not os.path.expanduser("~").startswith("~")
        if made.cache_dir or os.environ.get("INFINI_CACHE_DIR") or has_home:
            raise
    return made


def _check_folder(key: str, folder: Path) -> None:
    """Raise InputError for a path that is not a folder and where none can be created."""
    try:
        str(folder).encode()
        standing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        why = "" if standing.is_dir() else f"{standing} is a file"
    except OSError as error:
        why = str(error.strerror)
    except UnicodeEncodeError:
        why = "its name is not UTF-8"
    require(not why, key, str(folder), f"{why}; must be a folder, or a path where one can be created")


def short_warmup(steps: int, warmup: int) -> int:
    """Steps of warm-up of a recipe whose number of steps is set, and its warm-up is not."""
    return min(warmup, steps // 10)


def compose(overrides: Sequence[str]) -> Config:
    """The configuration of the defaults in `conf/` with `overrides` (`key=value`, Hydra's grammar).

    Raises InputError for an override that does not parse, and an unknown group, key or value.
    """
    overrides = normalise(overrides)
    parsed = _check(overrides)
    try:
        composed = _hydra_compose(overrides)
    except MissingConfigException as error:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group in groups():
            if not any(override.key_or_group == group for override in parsed):
                raise InputError(
                    f"{group}={choice!r}: this task and scale have no conf/{group}/{choice}.yaml; "
                    f"add it, or set {group} to one of {', '.join(groups()[group])}"
                ) from error
            one_of(group, choice, groups()[group])
        hint = "; joblib and submitit come with the extra `cluster`" if group == "hydra/launcher" else ""
        raise InputError(f"{first_line(error)}{hint}") from error
    except yaml.YAMLError as error:
        raise no_yaml(error) from error
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        # The last three come from inside Hydra, for some ways of setting a group.
        raise _explained(error, parsed) from error
    cfg = load(composed, overrides)
    for override in parsed:
        # The chosen one's other values would be left beside the name that an experiment, or the command line, sets.
        if override.key_or_group == "optimizer" and override.value() != cfg.optimizer.name:
            raise InputError(
                f"optimizer={override.value()!r}: optimizer.name={cfg.optimizer.name} is set, too, here or by the "
                "experiment; leave one of them out"
            )
        if override.key_or_group in ("recipe", "dims") and not override.is_delete():
            _check_beside_experiment(override, parsed, composed)
    return cfg


def _check_beside_experiment(chosen: Override, parsed: Sequence[Override], composed: DictConfig) -> None:
    """Raise InputError for a choice of a group whose settings give way, without a word, to those of the experiment."""
    group, others = chosen.key_or_group, [str(each.input_line) for each in parsed if each is not chosen]
    experiment = next((text for text in others if text.startswith("experiment=")), None)
    if experiment is None:
        return
    own = _hydra_compose([str(chosen.input_line)])[group]
    keys = given_keys([experiment]) - {each.key_or_group for each in parsed}
    lost = sorted(key for key in own if f"{group}.{key}" in keys and own[key] != composed[group][key])
    # The experiment's own choice, said again, changes nothing.
    if lost and _hydra_compose(others)[group] != composed[group]:
        raise InputError(
            f"{group}={chosen.value()!r}: {experiment} sets {', '.join(f'{group}.{key}' for key in lost)} itself; "
            f"set single keys of {group} beside it, or leave one of the two out"
        )


def normalise(overrides: Sequence[str]) -> list[str]:
    """The overrides in Hydra's grammar: a plain value that it cannot parse, as a path with `=`, gets quotes."""
    normalised = []
    for text in overrides:
        # Hydra does not accept null for a group. The default experiment is none.
        if text in ("experiment=null", "tuned=null"):
            normalised += ["~tuned"] if text == "tuned=null" else []
            continue
        key, separator, value = text.partition("=")
        if text.startswith("~") and (group := key.lstrip("~")) in groups():
            raise InputError(f"{text!r}: a group cannot be removed; choose one of {', '.join(groups()[group])}")
        if not key or not (separator or text.startswith("~")):
            raise InputError(f"{text!r}: not a setting; write key=value")
        # Python reads no integer of more than 4,300 digits.
        if longest := max((len(found) for found in re.findall(r"\d{4301,}", value)), default=0):
            raise InputError(f"{key}: a number of {longest:,} digits is too large")
        for candidate in (text,) if set("'\"[]{},\\") & set(value) else (text, f"{key}='{value}'"):
            with suppress(OverrideParseException):
                _parsed(candidate)
                normalised.append(candidate)
                break
        else:
            hint = "write key=value, and quotes around a value with brackets or commas"
            raise InputError(f"{text!r}: cannot be parsed; {hint}")
    return normalised


@functools.cache
def _parsed(text: str) -> Override:
    """One override, parsed by Hydra, which takes milliseconds; a command composes the same words many times."""
    return OverridesParser.create().parse_overrides([text])[0]


def parse_setting(text: str) -> tuple[str, Any]:
    """The key of `key=value` and the value that a composed configuration has for it; InputError for several values."""
    (override,) = _check(normalise([text]))
    return override.key_or_group, override.value()


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job of a sweep over lists of values; empty for a sampled range.

    Raises InputError for a key without values, and for more than MAX_JOBS jobs.
    """
    choices: list[list[str]] = []
    with _composing():
        # glob() needs the loader: it lists the choices of a group.
        loader = GlobalHydra.instance().config_loader()
        for override in OverridesParser.create(loader).parse_overrides(normalise(overrides)):
            given, key = str(override.input_line), override.get_key_element()
            if not override.is_sweep_override():
                choices.append([given])
                continue
            if not override.is_discrete_sweep():
                return []
            try:
                values = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
            except (HydraException, ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
                raise InputError(f"{given}: {first_line(error)}") from error
            if not values:
                raise InputError(f"{given}: has no values")
            choices.append([f"{key}={value}" for value in values])
    if math.prod(map(len, choices)) > MAX_JOBS:
        raise InputError(f"{math.prod(map(len, choices)):,} jobs or more: a sweep has at most {MAX_JOBS:,}")
    return [list(job) for job in itertools.product(*choices)]


@contextmanager
def _composing() -> Iterator[None]:
    """Initialize Hydra with `conf/`. It is a global: inside a sweep's job, the sweep's own is restored afterwards."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("infini.conf", version_base="1.3", job_name="infini"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _hydra_compose(overrides: Sequence[str]) -> DictConfig:
    """Hydra's configuration. Groups are read and joined once for each choice of them; values are set in a copy."""
    values: list[Override] = []
    others: list[Override] = []
    for override in map(_parsed, overrides):
        # Hydra itself sets values last and in this way. All else may change which files are read.
        plain = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
        key = override.key_or_group
        is_value = plain and not (key in groups() or "/" in key or key.partition(".")[0] == "hydra")
        (values if is_value else others).append(override)
    composed: DictConfig = pickle.loads(_joined_groups(tuple(str(override.input_line) for override in others)))
    try:
        for override in values:
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException:
        # It says in its own words what is wrong.
        return pickle.loads(_joined_groups(tuple(overrides)))
    return composed


@functools.cache
def _joined_groups(overrides: tuple[str, ...]) -> bytes:
    """Hydra's configuration, pickled: copy.deepcopy takes several times as long to copy it."""
    with _composing():
        return pickle.dumps(hydra.compose("config", list(overrides)))


def _check(overrides: Sequence[str]) -> list[Override]:
    parsed = [_parsed(text) for text in overrides]
    for override in parsed:
        key = override.key_or_group
        if not key:
            raise InputError(f"{override.input_line!r}: not a setting; write key=value")
        if override.is_sweep_override():
            raise InputError(f"{override.input_line}: several values for one key; add -m to run once for each")
        if "/" in key and not key.startswith("hydra/"):
            raise no_such_key(key, override.value(), [*groups(), *root_defaults()])
        if key.startswith("hydra/") and not isinstance(
            override.value(), str | type(None) if override.is_delete() else str
        ):
            raise InputError(
                f"{override.input_line}: takes the name of one of Hydra's configurations, for example basic"
            )
        if key in groups() and not override.is_delete():
            optional = key in OPTIONAL_GROUPS
            if not (optional and override.value() is None):
                one_of(key, override.value(), [*groups()[key], *(["null"] if optional else [])])
    return parsed


def _explained(error: Exception, parsed: Sequence[Override]) -> InputError:
    """One line for a failed composition: the unknown key if there is one, else Hydra's first line."""
    chosen = (o.input_line for o in parsed if o.input_line and o.key_or_group in groups() and not o.is_delete())
    try:
        known = list(_flat_keys(OmegaConf.to_container(pickle.loads(_joined_groups(tuple(chosen))), resolve=False)))
    except (HydraException, OmegaConfBaseException):
        return InputError(first_line(error))
    for override in parsed:
        key = override.key_or_group
        if not (key in groups() or override.is_add() or key in known or key.partition("/")[0].startswith("hydra")):
            return no_such_key(key, None if override.is_delete() else override.value(), [*known, *OPTIONAL_GROUPS])
    return InputError(first_line(error))


def _flat_keys(values: Any, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{prefix}{key}.")


def config_identity(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides the result of a training, as plain JSON types; without output folders.

    config: a configuration, or that of a record. Values of None are left out: an option that is off equals one that did
    not exist yet, so that the identity of a run does not change when options are added.
    """
    values = dataclasses.asdict(config) if isinstance(config, Config) else config
    identity: dict[str, Any] = {
        key: values.get(key) for key in ("task", "model", "dims", "scale", "optimizer", "recipe", "seed")
    }
    for group in ("scale", "task"):
        only_evaluated = evaluation_keys(group)
        identity[group] = {key: value for key, value in (identity[group] or {}).items() if key not in only_evaluated}
    # The task's positions have an effect through the model's only, which were all rotary before there was a choice.
    identity["task"].pop("positions", None)
    model = identity["model"] = dict(identity["model"] or {})
    if model.get("positions") == "rotary":
        del model["positions"]
    if "base" in model:
        # Sizes and tokenizer are the base's, whatever the configuration said before they were known.
        identity["dims"] = {"segment_length": (identity["dims"] or {}).get("segment_length")}
        left = {"tokenizer", "vocab_size"}
        identity["scale"] = {key: value for key, value in identity["scale"].items() if key not in left}
    # save_every is no part of the identity: a training resumes if it changes.
    if identity["recipe"]:
        identity["recipe"] = {key: value for key, value in identity["recipe"].items() if key != "save_every"}
    identity["init_from"] = values.get("init_from")
    identity["parallel"] = {"precision": (values.get("parallel") or {}).get("precision")}
    kept: dict[str, Any] = _without_none(identity)
    return kept


def _without_none(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_none(value) for key, value in values.items() if value is not None}


def config_hash(config: Config | Mapping[str, Any]) -> str:
    """First 12 hexadecimal digits of the SHA-256 of the identity's canonical JSON."""
    canonical = json.dumps(config_identity(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


def data_folder(corpus: str, data_dir: str | Path | None) -> tuple[Path, str] | None:
    """The folder of a corpus, and the setting that names it: `data_dir`, else $INFINI_DATA_DIR/`corpus`.

    None where neither is set; then the hub is used.
    """
    if data_dir is not None:
        return home_expanded("task.data_dir", data_dir), f"task.data_dir={str(data_dir)!r}"
    if root := os.environ.get("INFINI_DATA_DIR"):
        return home_expanded("INFINI_DATA_DIR", Path(root) / corpus), f"INFINI_DATA_DIR={root!r}"
    return None


def data_root(task: TaskConfig) -> Path | None:
    """Folder that should hold the task's data; None where the hub is used."""
    found = data_folder(task.corpus, task.data_dir)
    return None if found is None else found[0]


def cache_folder(cfg: Config, create: bool = True) -> Path:
    """Folder for tokenizers and tokenized data; it may be read-only. Without `create` it may not exist yet.

    InputError for an unknown home folder, and where it cannot be created or, without `create`, could not be.
    """
    variable = os.environ.get("INFINI_CACHE_DIR")
    key = "INFINI_CACHE_DIR" if variable and not cfg.cache_dir else "cache_dir"
    folder = home_expanded(key, cfg.cache_dir or variable or "~/.cache/infini")
    if not create:
        _check_folder(key, folder)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{key}={str(folder)!r}: cannot be created ({error.strerror}); name a writable folder"
        ) from error
    return folder
