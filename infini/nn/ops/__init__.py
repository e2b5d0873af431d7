"""The mathematics as pure functions: `reference` is the slow truth, the rest is proven against it."""
