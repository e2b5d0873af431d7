"""Arxiv-math: LaTeX source of mathematics, document by document."""

from infini.tasks.text.document_data import DocumentDataModule as DataModule
from infini.tasks.text.document_evaluation import evaluate

__all__ = ["DataModule", "evaluate"]
