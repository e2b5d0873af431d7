"""What is measured: data, prompts and metrics. Tasks import `infini`, never the reverse."""
