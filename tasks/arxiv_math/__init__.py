"""Arxiv-math: LaTeX source of mathematics, document by document."""

from tasks.document_data import DocumentDataModule
from tasks.document_evaluation import evaluate

__all__ = ["DataModule", "evaluate"]

DataModule = DocumentDataModule
