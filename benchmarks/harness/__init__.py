"""What the benchmarks share: rows, sides in processes of their own, jobs, peers, targets, the page."""
