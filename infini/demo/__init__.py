"""The trained model of `infini demo`: weights, description and tokenizer, as `infini train` wrote them."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""A checkpoint (see infini.training.checkpoint). `run_id` in its config.json names the record of its training."""
