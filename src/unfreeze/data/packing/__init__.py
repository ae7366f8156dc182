"""Pack examples into batches: the order of documents, and how they are combined."""
