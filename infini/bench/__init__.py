"""What a model costs in time and memory, measured."""
