"""L9, the kinds of training: each a Config on top and a main below, read from top to bottom."""
