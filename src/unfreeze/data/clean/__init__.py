"""Clean data files: filters, duplicates, evaluation texts, and a ledger of every byte (run.py)."""
