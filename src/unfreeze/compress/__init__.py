"""L7, compress: a checkpoint made into another, shard by shard. Today: an adapter merged into its base."""
