"""Summaries of whole books."""
