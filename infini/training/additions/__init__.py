"""Additions to the paper's training. Each is off by default and named in the record."""
