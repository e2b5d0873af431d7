"""Evaluation of models: perplexity of streams, decoding, dilution, and the cache of unfinished results."""
