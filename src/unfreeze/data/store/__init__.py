"""Encoded rows: created once on all cores, cached on disk, read in any order.

encoding.py    a batch of rows -> tokens, weights, statistics
workers.py     one process per core that does this
account.py     statistics of rows: used, cut, dropped, bad, duplicate
dataset.py     all rows of some files as a Dataset: examples, statistics, held-out rows
encoded.py     the same, cached on disk under a key of everything it depends on
examples.py    Examples[number] -> Example: tokens and weights of one document
documents.py   ... in memory, or read again from its file
streamed.py    large files in windows, so that the first step does not wait for the last row
handed.py      ... which one process encodes and sends to the others
remarks.py     warnings about the data
"""
