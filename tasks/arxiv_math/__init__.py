"""Arxiv-math: LaTeX sources of mathematics."""
