"""L2, the hot ops: a folder per op with reference.py (readable torch: the oracle) and its faster candidates."""
