"""Level 2: the fields of a run, read from TOML, flags and Python and checked. Imports no torch."""
