"""The machine around a run: devices and precision, memory, paths, progress and standard streams."""
