"""PG19: English books, read from their first page to their last."""

from tasks.document_data import DocumentDataModule
from tasks.document_evaluation import evaluate

__all__ = ["DataModule", "evaluate"]

DataModule = DocumentDataModule
