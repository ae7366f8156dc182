"""L10, what the command line does beside training: talk, look, export, compare.

A file per command, each with `main`.
"""
