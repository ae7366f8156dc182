"""Level 10: the commands other than training, such as chat, inspect, export and compare.

One file per command, each with `main`.
"""
