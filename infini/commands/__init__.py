"""One short module a verb; each has `run(cfg, overrides, ...)`, which returns an exit code, or None for success."""
