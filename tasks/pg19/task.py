"""PG19: English books, read from their first page to their last."""

from infini.tasks.text.document_data import DocumentDataModule
from infini.tasks.text.document_evaluation import evaluate

__all__ = ["DataModule", "evaluate"]

DataModule = DocumentDataModule
