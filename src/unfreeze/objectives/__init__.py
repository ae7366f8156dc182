"""Training objectives: pure functions (hidden_TD, lm_head, batch) -> Loss.

Each chooses its own blocks of logits. Layer 4.
"""
