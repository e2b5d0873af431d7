"""`infini demo`: hide a number in a long text, read the text with the packaged model, and ask for the number."""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console

from infini.commands.demo import DEMO_DIGITS
from infini.config.lengths import parse_length
from infini.config.schema import Config
from infini.demo import FOLDER
from infini.runs.common import keep_large_buffers, load_tokenizer
from infini.system.devices import autocast, peak_memory_bytes, pick_device
from infini.system.progress import duration, progress_bar
from infini.tasks.passkey.answers import Advance, Answer, Question, answer_questions
from infini.tasks.passkey.prompt import LONGEST_TRAINING, PasskeyTemplate, is_held_out
from infini.training.checkpoint import load_model

TRIAL_TOKENS = 16 * 1024
"""Tokens of a first text, read to estimate the seconds of the long one and to compare memory with it."""
WARM_UP_TOKENS, TOKENS_PER_CALL = 4096, 2048
"""Tokens that are read before that, and tokens of a call."""


def run(cfg: Config, overrides: list[str], key: str | None, depth: float) -> int:
    """Print the number, the answer, and what reading took. No record is written.

    key: None for a random one. depth: the part of the text before it.
    """
    keep_large_buffers()
    device, threads = pick_device(cfg.parallel.accelerator), torch.get_num_threads()
    # Steps of so small a model are short: beside other work a second thread waits for the first, and costs more.
    torch.set_num_threads(1)
    try:
        _demonstrate(cfg, key, depth, device)
    finally:
        torch.set_num_threads(threads)
    return 0


def _demonstrate(cfg: Config, key: str | None, depth: float, device: torch.device) -> None:
    model, description = load_model(FOLDER, device)
    tokenizer = load_tokenizer(FOLDER, description)
    template = PasskeyTemplate(tokenizer.encode, digits=DEMO_DIGITS, fill="exact", longest_training=LONGEST_TRAINING)
    length = parse_length(cfg.length[0])
    rng = np.random.default_rng()
    key = key or template.draw_key(rng, training=False)

    def ask(tokens: int, advance: Advance = lambda tokens: None) -> Answer:
        prompt = template.example(tokens, depth, rng, training=False, key=key)
        question = Question(tokens, f"{depth:g}", 0, prompt)
        with autocast(cfg.parallel.precision, device):
            (answer,) = answer_questions(
                model, [question], tokenizer.bos_id, tokens_per_call=TOKENS_PER_CALL, advance=advance
            )
        return answer

    weights = sum(parameter.numel() for parameter in model.parameters())
    console = Console(stderr=True)
    # Buffers are made when the first tokens are read, which would spoil the estimate.
    ask(min(WARM_UP_TOKENS, length))
    trial = ask(min(TRIAL_TOKENS, length))
    used = peak_memory_bytes(device)
    estimate = trial.seconds * length / trial.tokens_read
    console.print(
        f"hiding {key} in {length:,} tokens; a model of {weights:,} weights reads them in about {duration(estimate)}",
        highlight=False,
        soft_wrap=True,
    )
    with progress_bar("reading", length, console.is_terminal) as advance:
        answer = ask(length, advance)
    peak, said = peak_memory_bytes(device), tokenizer.decode(answer.given).replace(" ", "")
    position = answer.question.prompt.key_position
    seen = "no prompt of its training had this key" if is_held_out(key) else "prompts of its training may have had it"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one processor thread"
    # Carried after the long text, beside what was carried after the first one.
    (memory, segment), before = ((each.memory_bytes, each.state_bytes - each.memory_bytes) for each in (answer, trial))
    same = "the same" if before == (memory, segment) else f"{before[0]:,} + {before[1]:,}"
    rows = {
        "key": f"{key}, after {position:,} of {length:,} tokens ({seen})",
        "answer": f"{said}, {'right' if answer.exact else 'wrong'}",
        "time": f"{answer.seconds:.1f} s, {answer.tokens_read / answer.seconds:,.0f} tokens/s on {where}",
        "memory": f"{memory:,} bytes + {segment:,} for the current segment ({same} after "
        f"{trial.question.length:,} tokens)",
        "peak": f"{peak / 2**20:,.0f} MiB of the whole process, {(peak - used) / 2**20:,.1f} of them since "
        f"{trial.question.length:,} tokens",
    }
    for name, text in rows.items():
        print(f"{name:<8}{text}")


def reading_speed(length: int) -> float:
    """Tokens a second at which the packaged model reads a prompt of `length` tokens on one thread of this processor."""
    keep_large_buffers()
    model, description = load_model(FOLDER, torch.device("cpu"))
    tokenizer = load_tokenizer(FOLDER, description)
    template = PasskeyTemplate(tokenizer.encode, digits=DEMO_DIGITS, longest_training=LONGEST_TRAINING)
    prompt = template.example(length, 0.0, np.random.default_rng(0), training=False)
    questions, threads = [Question(length, "start", 0, prompt)], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with autocast("auto", torch.device("cpu")):
            (answer,) = answer_questions(model, questions, tokenizer.bos_id, tokens_per_call=TOKENS_PER_CALL)
    finally:
        torch.set_num_threads(threads)
    return answer.tokens_read / answer.seconds
