"""Rows to tokens: tokenizers, chat templates, and which tokens carry loss."""
