"""Convert rows to tokens: tokenizers, chat templates, and the loss mask."""
