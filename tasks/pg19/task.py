"""PG19: English books, read from beginning to end."""

from infini.tasks.text.document_data import DocumentDataModule as DataModule
from infini.tasks.text.document_evaluation import evaluate

__all__ = ["DataModule", "evaluate"]
