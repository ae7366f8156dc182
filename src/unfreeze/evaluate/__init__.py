"""L7, what a model does: its loss on held-out text, its answers, its sampler against its trainer."""
