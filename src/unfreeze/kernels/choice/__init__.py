"""Which implementation of an op runs: its candidates, the measured records, and measuring them."""
