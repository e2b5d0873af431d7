"""Long-context benchmarks of other papers, asked of any language model: RULER's single needles, and BABILong."""
