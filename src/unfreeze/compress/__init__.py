"""L7, compress: converts a checkpoint, shard by shard. Today: merges an adapter into its base."""
