"""Shared parts of the benchmarks: rows, sides in processes of their own, jobs, peers, targets, the page."""
