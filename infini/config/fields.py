"""Fields of configuration dataclasses that carry their documentation."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(doc: str, *, evaluation: bool = False, training: bool = False) -> Any:
    """A field without a default.

    doc: what the field means; `infini <verb> --help` prints it.
    evaluation: whether only evaluations read the field. Such a field is not part of the identity of a training.
    training: whether only trainings read it. An evaluation has the value of its training, and refuses another.
    """
    return dataclasses.field(metadata={"doc": doc, "evaluation": evaluation, "training": training})
