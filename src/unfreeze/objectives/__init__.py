"""What training minimises: pure functions (hidden_TD, lm_head, batch) -> Loss.

Each owns its chunking over the vocabulary. Layer 4.
"""
