"""Read rows from files: the first of three steps from a data file to a batch."""
