"""Tasks: data, prompts and metrics. They import `infini`, which does not import them."""
