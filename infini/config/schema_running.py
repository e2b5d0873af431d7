"""The groups of the configuration that say how things run, are measured and shown; see `infini.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass

from infini.errors import InputError, at_least, one_of, require

EVALUATION_KEYS = {
    "scale": ("eval_max_tokens", "eval_segments_per_call", "knockouts", "knockout_max_tokens"),
    "task": (
        "knockout",
        "examples",
        "rows_per_call",
        "split",
        "input_length",
        "references",
        "reference",
        "reference_words",
    ),
}
"""Keys that matter to an evaluation only."""

MADE_FOR_A_GPU = {"scale": ("gpu", "paper"), "suite": ("paper", "paper_models")}
"""Group -> choices whose work takes days on a processor, and more memory than most have."""


def check_made_for(group: str, choice: str, accelerator: str) -> None:
    """Raises InputError where a choice is made for a GPU, there is none, and the processor was not asked for."""
    if choice not in MADE_FOR_A_GPU[group] or accelerator != "auto":
        return
    import torch

    if not torch.cuda.is_available():
        other = "scale=laptop is made for a processor, and " if group == "scale" else ""
        raise InputError(
            f"{group}={choice}: is made for a GPU, and there is none here; {other}parallel.accelerator=cpu runs this "
            "on the processor all the same"
        )


@dataclass
class ParallelConfig:
    """Devices and precision."""

    name: str
    """Name of this arrangement."""
    accelerator: str
    """auto, cpu or gpu."""
    devices: int
    """Number of devices."""
    strategy: str
    """Lightning's name of the strategy."""
    precision: str
    """Compute type of matrix products: fp32, bf16, or auto (bf16 where the hardware multiplies it fast)."""
    compile: str
    """Whether models that read segments one after the other with gradients through all of them (rmt) train by compiled
    code: always, never, or auto (long trainings on a processor)."""

    def __post_init__(self) -> None:
        one_of("parallel.compile", self.compile, ("auto", "always", "never"))
        one_of("parallel.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        one_of("parallel.precision", self.precision, ("auto", "bf16", "fp32"))
        at_least("parallel", self, 1, "devices")


@dataclass
class LoggerConfig:
    """Where training curves go."""

    name: str
    """csv, wandb (offline where nobody is logged in), tensorboard, or none."""

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("csv", "wandb", "tensorboard", "none"))


@dataclass
class SuiteConfig:
    """What `infini bench` measures."""

    name: str
    """train, models, stream, decode, sources, lengths, all, paper or paper_models."""
    models: list[str]
    """Models whose training step is measured; `local`, with which the others are compared, is one."""
    repeats: int
    """Interleaved repeats of a training step of each model; 0 leaves the training step out."""
    stream_short_tokens: int
    """Length of the short stream that the long one is compared with."""
    stream_tokens: int
    """Length of the long stream, a multiple of the short one; 0 leaves streaming out."""
    checkpointing: bool
    """Whether training steps are also measured with activations computed again in the backward pass."""
    oracle_tokens: int
    """Tokens on which one layer is compared with the slow reference in float64; 0 leaves the comparison out."""
    agreement_tokens: int
    """Tokens on which every model on this device is compared with itself on the processor; 0 leaves that out."""
    decode_tokens: int
    """Tokens read one by one after a short and after a long text; 0 leaves decoding out."""
    decode_short_tokens: int
    """Length of the short text."""
    decode_long_tokens: int
    """Length of the long one."""
    source_tokens: list[int]
    """Lengths of sources that an encoder-decoder reads; none leaves that out."""
    training_segments: list[int]
    """Lengths of training sequences, in segments, whose step's peak memory is measured; none leaves that out."""
    training_group: int
    """Segments whose activations are kept at a time, beside all of them."""

    def __post_init__(self) -> None:
        at_least("suite", self, 0, "repeats", "stream_tokens", "oracle_tokens", "agreement_tokens", "decode_tokens")
        at_least("suite", self, 1, "stream_short_tokens", "decode_short_tokens", "training_group")
        at_least("suite", self, self.decode_short_tokens, "decode_long_tokens")
        for key in ("source_tokens", "training_segments"):
            lengths = getattr(self, key)
            whole = all(isinstance(length, int) and not isinstance(length, bool) and length > 0 for length in lengths)
            require(whole, f"suite.{key}", lengths, "whole numbers of at least 1")
        measured = (self.repeats, self.stream_tokens, self.oracle_tokens, self.agreement_tokens, self.decode_tokens)
        require(
            any(measured) or bool(self.source_tokens) or bool(self.training_segments),
            "suite.repeats",
            self.repeats,
            "must be above 0: nothing else is measured",
        )
        require("local" in self.models, "suite.models", self.models, "local and others to compare with it")
        fits = self.stream_tokens % self.stream_short_tokens == 0 and self.stream_tokens != self.stream_short_tokens
        allowed = f"0, or a multiple of suite.stream_short_tokens={self.stream_short_tokens}, at least twice it"
        require(fits, "suite.stream_tokens", self.stream_tokens, allowed)


@dataclass
class DecodingConfig:
    """How `infini generate` draws tokens."""

    name: str
    max_new_tokens: int
    """Tokens that are drawn, unless the model ends the text before."""
    temperature: float
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_p: float
    """Only the likeliest tokens whose probabilities first reach this sum can be drawn; 1 is all of them."""

    def __post_init__(self) -> None:
        at_least("decoding", self, 0, "max_new_tokens", "temperature")
        require(0 < self.top_p <= 1, "decoding.top_p", self.top_p, "must be above 0 and at most 1")
