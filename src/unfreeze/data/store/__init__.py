"""Encoded rows: made once, by all cores, kept on disk, read in any order.

encoding.py    a batch of rows -> tokens, weights, account
workers.py     a process for each core does that
account.py     what became of every row: used, cut, dropped, bad, doubled
dataset.py     all rows of some files as a Dataset: examples, account, held-out rows
encoded.py     the same on disk, found again by a key of all it was made of
examples.py    Examples[number] -> Example: tokens and weights of one document
documents.py   ... in memory, or read again from its file
streamed.py    large files in windows, so that the first step needs not wait for the last row
handed.py      ... which one process encodes and hands to the others
remarks.py     what is said about it
"""
