"""L7, evaluation: loss on held-out text, style of answers, and the gap between sampler and trainer."""
