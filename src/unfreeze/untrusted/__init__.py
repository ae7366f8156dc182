"""Level 1: safe reading of untrusted input: JSON, regular expressions, and limits for chat templates."""
