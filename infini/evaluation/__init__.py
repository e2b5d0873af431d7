"""What is measured of a model: perplexity of streams, decoding, dilution, and results kept while they are made."""
