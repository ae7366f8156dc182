"""A checkpoint in bf16 becomes one in a quantized format, shard by shard.

The formats, the choice of modules and the joint for a rounding are in formats.py, the plan in work.py, the
files in write.py.
"""
