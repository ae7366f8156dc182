"""config.json as families read it: FIELDS, and `shape` with its checks, in a file named as the family's.

A family's own file has both if it stays within 120 lines; otherwise it takes them from here. Nothing here
makes modules.
"""
