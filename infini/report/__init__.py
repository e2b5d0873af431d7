"""Makes tables and figures from run records. Every result shown comes from a record."""
