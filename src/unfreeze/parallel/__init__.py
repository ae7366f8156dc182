"""L5, several processes: processes/ communicates, placement/ moves weights, plan/ counts the cost."""
