"""L1, what reads foreign bytes with suspicion: JSON, patterns, and what a chat template may use up."""
