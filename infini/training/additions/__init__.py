"""Additions to the paper's training, each off by default and named in the record."""
