"""Each model has one colour and marker in all figures, and colour-blind readers can tell the models apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from report_runs import make_eval

from infini.report.canvas import spread
from infini.report.palette import FILLS, LINE_STYLES, MODELS, _luminance, drawn_as, ink, look_of, looks

MAIN = list(MODELS)[:10]
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}
# Linear sRGB -> LMS -> Oklab (Ottosson 2020).
LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
LAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])


def seen(colour: str, eye: str) -> np.ndarray:
    """A colour in Oklab, whose distances are those that are seen."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return LAB @ np.cbrt(LMS @ np.clip(EYES[eye] @ linear, 0, 1))


@pytest.mark.parametrize("eye", EYES)
def test_the_ten_models_differ_for_every_eye(eye: str) -> None:
    assert {"infini_linear", "infini_delta", "transformer_xl", "rmt", "local", "full"} <= set(MAIN)
    distances = {
        pair: float(np.linalg.norm(np.subtract(*(seen(MODELS[model][0], eye) for model in pair))))
        for pair in itertools.combinations(MAIN, 2)
    }
    # More than twice what is just noticed (0.02); markers differ besides.
    assert min(distances.values()) > 0.05, min(distances, key=lambda pair: distances[pair])


def test_every_model_has_its_own_colour_and_marker() -> None:
    assert (
        len({colour for colour, *_ in MODELS.values()})
        == len({marker for _, marker, _ in MODELS.values()})
        == len(MODELS)
    )


def test_every_language_model_has_a_name() -> None:
    assert len({name for *_, name in MODELS.values()}) == len(MODELS)


def test_a_model_looks_alike_in_every_figure_and_its_variants_like_it() -> None:
    alone, beside = looks({"rmt": "rmt"}), looks({"b": "rmt", "local": "local", "rmt": "rmt"})
    assert alone["rmt"] == beside["rmt"] == look_of("rmt")
    assert beside["b"] != beside["rmt"] and beside["b"].marker == beside["rmt"].marker
    # A model that is not listed gets the same look each time.
    assert looks({"mine": "mine"})["mine"] == look_of("mine") != look_of("local")


def test_eighteen_variants_of_a_model_differ() -> None:
    """They differ as markers without lines, and as lines without markers, which training curves are."""
    variants = [look_of("rmt", number) for number in range(18)]
    assert len({(look.colour, look.fill) for look in variants}) == 18
    assert len({(look.colour, look.line) for look in variants}) == 18
    assert len(set(LINE_STYLES)) == len(LINE_STYLES) == len(FILLS)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"base": "b", "memory": "infini", "update_rule": "linear"}, "infini_linear"),
        ({"base": "b", "memory": "infini", "update_rule": "delta"}, "infini_delta"),
        ({"base": "b", "memory": "none", "update_rule": "delta"}, "local"),
        ({"base": "b", "memory": "full", "update_rule": "delta"}, "full"),
        ({"base": "b"}, "llm"),
        ({"update_rule": "delta"}, "llm"),
        (None, "llm"),
    ],
)
def test_a_pretrained_model_looks_like_the_one_with_its_memory(options: dict[str, str] | None, model: str) -> None:
    assert drawn_as(make_eval("llm", 1, config={"model": options})) == model


@pytest.mark.parametrize("model", MODELS)
def test_labels_can_be_read(model: str) -> None:
    for variant in range(3):
        assert 1.05 / (_luminance(ink(look_of(model, variant).colour)) + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([5.0, 5.0], [4.5, 5.5]),
        ([5.0, 5.0, 8.0], [4.5, 5.5, 8.0]),
        ([9.9, 9.8], [9.5, 8.5]),
        ([0.0, 3.0], [0.5, 3.0]),
        ([2.0, 1.0], [2.0, 1.0]),
    ],
)
def test_labels_move_as_little_as_they_must(wanted: list[float], found: list[float]) -> None:
    assert spread(wanted, [1.0] * len(wanted), 0.0, 10.0) == pytest.approx(found)


def test_labels_without_room_are_in_order_from_the_bottom() -> None:
    assert spread([1.0, 0.5, 1.0], [1.0, 1.0, 1.0], 0.0, 2.0) == pytest.approx([1.5, 0.5, 2.5])
