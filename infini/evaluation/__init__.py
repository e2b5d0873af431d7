"""Evaluation of models: perplexity of streams, decoding, dilution, results and states of unfinished evaluations."""
