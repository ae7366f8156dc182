"""Examples to packed batches: their order, and how they are put together."""
