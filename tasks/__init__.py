"""Tasks: data, prompts and metrics. They import `infini`. In turn, `infini.runs` imports tasks, and `infini.config`
loads the configuration module of the chosen task by its name."""
