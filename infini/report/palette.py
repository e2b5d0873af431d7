"""One colour and marker for each model in all figures, for eyes of any kind: colours of Okabe and Ito, and of Paul Tol.

A model that is not listed gets a colour and marker by its name, the same in every figure.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.typing import FillStyleType

    from infini.records import RunRecord

MODELS: dict[str, tuple[str, str, str]] = {
    "infini_linear": ("#D55E00", "o", "Linear"),
    "infini_delta": ("#0072B2", "s", "Linear + Delta"),
    "infini_xl": ("#AA4499", "P", "Linear, with Transformer-XL's cache"),
    "transformer_xl": ("#009E73", "^", "Transformer-XL"),
    "compressive": ("#E69F00", "v", "Compressive Transformer"),
    "memorizing": ("#56B4E9", "D", "Memorizing Transformers"),
    "rmt": ("#882255", "X", "RMT"),
    "autocompressor": ("#332288", "*", "AutoCompressors"),
    "local": ("#777777", "h", "Local attention"),
    "full": ("#000000", "p", "Full attention"),
    # Summaries and language models of the hub are in figures of their own.
    "bart": ("#44AA99", "<", "BART"),
    "primera": ("#661100", ">", "PRIMERA"),
}
"""Model -> its colour and marker, and its name in figures of measurements, whose rows no report names."""
UNLISTED = (("#CC79A7", "d"), ("#117733", "H"), ("#AA3377", "8"), ("#666633", "<"), ("#4477AA", ">"))
"""Colours and markers of models that are not listed."""
MUTED = "0.45"
"""Colour of what is not data: captions, baselines and marks."""
HEATMAP_TOP = "#0072B2"
"""Colour of the highest value of a heatmap; the lowest is white."""
LINE_STYLES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)))
FILLS: tuple[FillStyleType, ...] = ("full", "none", "left", "top", "right", "bottom")
_TINTS = (("white", 0.0), ("white", 0.4), ("black", 0.35))


@dataclass(frozen=True)
class Look:
    """The appearance of a row in figures."""

    colour: str
    marker: str
    line: Any
    """A line style of matplotlib."""
    fill: FillStyleType

    @property
    def drawn(self) -> dict[str, Any]:
        """Keywords of a line with markers."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.line,
            "fillstyle": self.fill,
            "linewidth": 1.3,
            "markersize": 4.5,
        }


def look_of(model: str, variant: int = 0) -> Look:
    """The look of a model. Its variants (1, 2, ...) have its marker, and tints of its colour."""
    colour, marker, *_ = MODELS.get(model) or UNLISTED[zlib.crc32(model.encode()) % len(UNLISTED)]
    rounds, place = divmod(variant, len(FILLS))
    # There are as many lines as fillings, and the tint moves on after a round of them: eighteen variants differ, as
    # lines without markers and as markers without lines.
    towards, share = _TINTS[(place + rounds) % len(_TINTS)]
    return Look(_mixed(colour, towards, share), marker, LINE_STYLES[place], FILLS[place])


def looks(models: Mapping[str, str]) -> dict[str, Look]:
    """Row -> its look. models: row -> its model. The row of a model's name, or its first, is the model itself."""
    found: dict[str, Look] = {}
    for model in dict.fromkeys(models.values()):
        rows = sorted((row for row in models if models[row] == model), key=lambda row: row != model)
        found |= {row: look_of(model, variant) for variant, row in enumerate(rows)}
    return {row: found[row] for row in models}


def drawn_as(run: RunRecord) -> str:
    """The model whose look the row of a run has: its own, or of a pretrained language model the one that has the same
    memory, or none."""
    options = run.config.get("model") or {}
    rule = f"infini_{options.get('update_rule')}"
    memories = {"infini": rule, "none": "local", "full": "full"} if "base" in options else {}
    return memories.get(str(options.get("memory")), run.model)


def ink(colour: str) -> str:
    """The colour for text on white: darker until its contrast is 4.5 (WCAG 2.2), if it is written as #RRGGBB."""
    while colour.startswith("#") and _luminance(colour) > 1.05 / 4.5 - 0.05:
        colour = _mixed(colour, "black", 0.08)
    return colour


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB, 0 to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _parts(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _mixed(colour: str, towards: str, share: float) -> str:
    end = 1.0 if towards == "white" else 0.0
    return "#" + "".join(f"{round(255 * (part + share * (end - part))):02X}" for part in _parts(colour))
