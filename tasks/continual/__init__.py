"""Continual pre-training: a mixture of books, mathematics and web pages."""
