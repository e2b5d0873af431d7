"""Documents as tokens: folders, the hub, EPUB, tokenizers, the token cache and the training stream."""
