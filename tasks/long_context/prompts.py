"""Prompts and scores of lm-evaluation-harness (lm-eval): the generator of RULER's needles, the prompts of BABILong."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from infini.config.lengths import format_length
from infini.errors import InputError
from infini.system.network import reachable
from infini.tasks.long_context.config import NEEDLES
from infini.tasks.text.documents import TextTokenizer

RULER_TOKENS = 128
"""Tokens of an answer in RULER. They count as part of its length."""
ESSAYS = "baber/paul_graham_essays"
"""The hub data set in which the needles of niah_single_2 and niah_single_3 are hidden."""
INSTALL = "pip install 'lm-eval[ruler]>=0.4.13,<0.5'"
_KINDS = dict(zip(NEEDLES, (("repeat", "numbers"), ("essay", "numbers"), ("essay", "uuids")), strict=True))
"""Subtask -> haystack and kind of the needle, as RULER names them."""


@dataclass(frozen=True)
class Prompt:
    """A question on a long text."""

    subtask: str
    length: int
    """Tokens by the name of the benchmark, for prompt and answer together."""
    index: int
    ids: np.ndarray
    """Token ids, without one for the beginning of a document."""
    answers: tuple[str, ...]
    needle: int | None
    """Position of the answer's last token in `ids`; None where the answer is spread over the text."""
    max_new_tokens: int
    score: Callable[[str], float]
    """Continuation -> fraction of the answers that it contains, by the benchmark. A longer one scores no less."""

    @property
    def name(self) -> str:
        """Unique among all prompts: the answer to another text with this number is another answer."""
        return f"{self.subtask}/{self.length}/{self.index}/{hashlib.sha256(self.ids.tobytes()).hexdigest()[:8]}"


def make_prompts(subtask: str, length: int, count: int, tokenizer: TextTokenizer, seed: int) -> list[Prompt]:
    """`count` prompts of a subtask at one length. They depend on the seed and the tokenizer, but on no other length and
    not on `count`.

    Raises InputError where lm-eval is not installed, its data cannot be loaded, there are fewer prompts of that length,
    or the tokenizer cannot write an answer.
    """
    make = _needles if subtask in NEEDLES else _babilong
    random_state = random.getstate()
    # Both draw from the generator of the module `random`.
    random.seed(f"{seed}/{subtask}/{length}")
    try:
        # Importing and generating prints progress, and warnings on data that these prompts do not need.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prompts = list(make(subtask, length, count, tokenizer))
    except ImportError as error:
        raise InputError(f"task.subtasks={subtask!r}: needs lm-evaluation-harness ({error}); {INSTALL}") from error
    finally:
        random.setstate(random_state)
    if len(prompts) < count:
        raise InputError(
            f"task.examples={count}: there are {len(prompts)} prompts of task.subtasks={subtask}, length="
            f"{format_length(length)}"
        )
    for answer in (answer for prompt in prompts for answer in prompt.answers):
        # A vocabulary of single words has no token for most names and numbers.
        if answer not in tokenizer.decode(tokenizer.encode(answer)):
            raise InputError(
                f"task=long_context: the model's tokenizer {tokenizer.name} cannot encode the answer {answer!r}; use a "
                "model that was trained on text"
            )
    return prompts


def revision() -> str:
    """The versions of what decides the prompts, beside data of the hub."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ", ".join(f"{name} {version(name)}" for name in ("lm-eval", "wonderwords"))
    except PackageNotFoundError as error:
        raise InputError(f"task=long_context needs lm-evaluation-harness: {INSTALL}") from error


@contextlib.contextmanager
def _quiet_nltk() -> Iterator[None]:
    """Silence nltk while lm-eval is imported. The import asks the network for sentence rules that numbers do not need.
    Without a network, nltk prints a message to the standard error that it found when it was imported, which may be
    closed."""
    import nltk

    download = nltk.download
    nltk.download = partial(download, print_error_to=io.StringIO())
    try:
        yield
    finally:
        nltk.download = download


def _needles(subtask: str, length: int, count: int, tokenizer: TextTokenizer) -> Iterator[Prompt]:
    with _quiet_nltk():
        from lm_eval.tasks.ruler import common_utils, niah_utils, prepare_niah

    haystack, kind = _KINDS[subtask]
    text = _from_hub(subtask, ESSAYS, lambda: prepare_niah.get_haystack(type_haystack=haystack))
    try:
        samples = prepare_niah.generate_samples(
            text,
            max_seq_length=length,
            template=niah_utils.TEMPLATE,
            type_haystack=haystack,
            type_needle_k="words",
            type_needle_v=kind,
            num_samples=count,
            tokens_to_generate=RULER_TOKENS,
            TOKENIZER=lambda text: SimpleNamespace(input_ids=tokenizer.encode(text)),
        )
    except LookupError as error:
        # nltk raises this class itself, not a subclass, for missing sentence rules.
        if type(error) is not LookupError:
            raise
        raise InputError(
            f"task.subtasks={subtask!r}: nltk's English sentence model (punkt_tab) is missing; connect to a network "
            "and run python -m nltk.downloader punkt_tab"
        ) from error
    except ValueError as error:
        if "Could not generate any sample" not in str(error):
            raise
        raise InputError(f"length={format_length(length)}: too short for task.subtasks={subtask}") from error

    def score(answers: Sequence[str], continuation: str) -> float:
        return float(common_utils.string_match_all(common_utils.postprocess_pred([continuation]), [list(answers)]))

    for index, sample in enumerate(samples):
        answers = tuple(sample["outputs"])
        # The answer begins as lm-eval's `gen_prefix` says.
        prompt = f"{sample['input']} {sample['gen_prefix']}"
        needle = len(tokenizer.encode(prompt[: prompt.index(answers[0]) + len(answers[0])])) - 1
        ids = tokenizer.encode(prompt)
        if 2 * (len(ids) + RULER_TOKENS) < length:
            # lm-eval takes all essays that there are, and steps of 500 words.
            raise InputError(
                f"length={format_length(length)}: the prompts of task.subtasks={subtask} would have only {len(ids):,} "
                "tokens; choose a length near that"
            )
        yield Prompt(subtask, length, index, ids, answers, needle, RULER_TOKENS, partial(score, answers))


def _babilong(subtask: str, length: int, count: int, tokenizer: TextTokenizer) -> Iterator[Prompt]:
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "babilong"
    # Its data sets are named 1k, 2k, 4k to 128k.
    sizes = {2**power << 10: f"{2**power}k" for power in range(8)}
    if length not in sizes:
        allowed = ", ".join(map(format_length, sizes))
        raise InputError(f"length={format_length(length)}: task.subtasks={subtask} has {allowed}")
    name = sizes[length]

    def load() -> Any:
        manager = lm_eval.tasks.TaskManager(
            include_path=str(folder), include_defaults=False, metadata={"max_seq_lengths": name}
        )
        task = manager.load(subtask)["tasks"][subtask]
        order = list(range(len(task.eval_docs)))
        random.shuffle(order)
        task.build_all_requests(samples=order[:count])
        # lm-eval sorts them.
        task.instances.sort(key=lambda request: order.index(request.doc_id))
        return task

    task = _from_hub(subtask, f"RMT-team/babilong-1k-samples ({name})", load)
    for index, request in enumerate(task.instances):
        text, options = request.args
        answers = (str(request.doc["target"]).strip(),)

        def score(continuation: str, doc: dict[str, Any] = request.doc) -> float:
            return float(task.process_results(doc, [continuation])["acc"])

        ids = tokenizer.encode(text)
        yield Prompt(subtask, length, index, ids, answers, None, options["max_gen_toks"], score)


def _from_hub(subtask: str, what: str, get: Callable[[], Any]) -> Any:
    from infini.tasks.text.hub import caches_only

    try:
        with contextlib.nullcontext() if reachable() else caches_only():
            return get()
    except ImportError:
        raise
    except Exception as error:  # every layer below (network, hub, parser) raises its own kinds
        raise InputError(
            f"task.subtasks={subtask!r}: {what} cannot be downloaded from the hub ({type(error).__name__}); connect to "
            f"a network, or use task.subtasks=[{NEEDLES[0]}], which needs none"
        ) from error
