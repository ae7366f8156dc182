"""What training minimises: pure functions (hidden_TD, lm_head, batch) -> Loss.

Each decides by itself how it cuts the logits into blocks. Layer 4.
"""
