"""Pretrained models: encoder-decoders, also with Unlimiformer; `llm` puts the memory into language models."""
