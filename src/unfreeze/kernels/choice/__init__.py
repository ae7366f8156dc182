"""Chooses the implementation of an op: its candidates, the measured records, and measuring them."""
