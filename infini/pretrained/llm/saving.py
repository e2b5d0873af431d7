"""The files next to the weights of an injected model: a model card, and a file that names its classes."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from infini.pretrained.llm.settings import settings_of

REMOTE_CODE = "modeling_infini"
"""The file by which a process finds the classes that never imported `infini`, with trust_remote_code=True."""
OWN_CARD = "<!-- Written by infini. save_pretrained replaces this file unless this line is removed. -->"
"""The line that distinguishes a model card of ours from a user's."""


def auto_map(config_class: type, model_class: type) -> dict[str, str]:
    """The config's entry for that file."""
    return {
        "AutoConfig": f"{REMOTE_CODE}.{config_class.__name__}",
        "AutoModelForCausalLM": f"{REMOTE_CODE}.{model_class.__name__}",
    }


def write_beside_weights(model: Any, folder: str | Path) -> None:
    """Write both files. A README.md that the user wrote stays, and a line says so."""
    path = Path(folder)
    names = f"{type(model.config).__name__}, {type(model).__name__}"
    code = (
        "# The classes are in the package infini-attention-suite: pip install infini-attention-suite\n"
        f"from infini.pretrained.llm.families import {names}  # noqa: F401\n"
    )
    (path / f"{REMOTE_CODE}.py").write_text(code, encoding="utf-8")
    # safetensors makes files that the owner alone can read.
    for weights in path.glob("*.safetensors"):
        weights.chmod((path / f"{REMOTE_CODE}.py").stat().st_mode)
    card = path / "README.md"
    if card.exists() and not is_own_card(card):
        logging.getLogger(__name__).warning("%s was not written by infini and stays as it is", card)
    else:
        card.write_text(model_card(model), encoding="utf-8")


def is_own_card(card: Path) -> bool:
    """Whether infini wrote this README.md."""
    return OWN_CARD in card.read_text(encoding="utf-8", errors="replace")


def model_card(model: Any, training: str = "") -> str:
    """Markdown with front matter: the base, the settings, the current gates, the training, and how to load it.

    Gates that cannot be read here are left out. training: in words; "" takes what the config says, or that nothing is
    recorded, because weights do not say whether a loop or a merged adapter has changed them.
    """
    settings = settings_of(model.config)
    on_hub = settings.base.count("/") == 1 and not Path(settings.base).exists()
    tags = ", ".join(dict.fromkeys(["infini-attention", "long-context", *(getattr(model, "model_tags", None) or [])]))
    head = ["library_name: transformers", f"tags: [{tags}]"]
    head += [f"base_model: {settings.base}"] if on_hub else []
    # Gates on disk (meta) or held by other processes (empty) are left out. Where peft trains a copy, the copy is read.
    gated = (module.infini_gate for module in model.modules() if hasattr(module, "infini_gate"))
    betas = (gate.beta for gate in gated if hasattr(gate, "beta") and gate.beta.device.type != "meta")
    shares = [float(x) for beta in betas for x in beta.detach().float().sigmoid().flatten()]
    gates = f"{len(shares)}, from {min(shares):.3f} to {max(shares):.3f}" if shares else None
    rows = {
        "base": settings.base or "not recorded",
        **({"weights": model.config.base_weights} if hasattr(model.config, "base_weights") else {}),
        "segment length": f"{settings.segment_length} tokens",
        "update rule": {"linear": "linear (Eq. 4)", "delta": "linear + delta (Eq. 5)"}[settings.update_rule],
        "layers with a memory": f"{len(settings.layers)} of {model.config.num_hidden_layers}: "
        + ", ".join(map(str, settings.layers)),
        **({"gates, sigmoid(beta)": gates} if gates else {}),
        "first segment": settings.first_segment,
        "window (an addition to the paper unless `segment`)": settings.window,
        "sinks (an addition to the paper unless 0)": str(settings.sinks),
        **({"memory decay (an addition to the paper)": "learned"} if settings.memory_decay is not None else {}),
        **({"input gate (an addition to the paper)": "learned"} if settings.input_gate else {}),
        "training": training or settings.training or "not recorded",
    }
    within = "Quality depends on the training, also within a segment."
    if settings.first_segment == "local":
        within = (
            "Within a segment an untrained memory changes nothing: the model equals its base there if its weights do. "
            "Beyond it,\nquality depends on the training."
        )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    front = "\n".join(head)
    return f"""---
{front}
---

{OWN_CARD}

# {type(model).__name__}

A pretrained model with the compressive memory of Infini-attention (arXiv 2404.07143): bounded cache, any length.

| | |
| --- | --- |
{table}

```python
import infini.pretrained.llm  # makes the model's class known
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER_OR_ID")
```

{within}
"""


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
    tags: list[str] | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
) -> str:
    """Upload what `save_pretrained` writes to the hub -> the commit's address. A README.md that the user wrote stays.

    Options are those of transformers' push_to_hub.
    """
    from huggingface_hub import HfApi

    model.add_model_tags(tags or [])
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    keeps_card = api.file_exists(repo_id, "README.md", revision=revision) and not is_own_card(
        Path(api.hf_hub_download(repo_id, "README.md", revision=revision))
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=["README.md"] if keeps_card else None,
        )
    return str(commit.commit_url)
