"""Encoder-decoder systems on transformers' own classes."""
