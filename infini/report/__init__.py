"""From run records to tables and figures. Nothing here computes a result that is not in a record."""
