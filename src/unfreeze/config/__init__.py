"""L2, the fields of a run: read from TOML, flags and Python, checked, with their units and ranges.

Imports no torch.
"""
