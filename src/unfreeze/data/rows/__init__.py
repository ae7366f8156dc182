"""Files to rows: the first of the three steps from a data file to a batch."""
