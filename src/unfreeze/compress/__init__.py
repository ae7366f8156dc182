"""L7, compress: converts a checkpoint, shard by shard. Merges an adapter into its base, quantizes."""
