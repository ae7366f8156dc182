"""The nouns that travel between rooms: Batch, Loss, Event, errors, and how bytes and seconds are written.

Layer 0.
"""
