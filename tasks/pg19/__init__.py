"""PG19: English books, read from their first page to their last."""
