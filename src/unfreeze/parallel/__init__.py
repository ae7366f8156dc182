"""L5: processes/ talk, placement/ moves weights, plan/ counts what that takes."""
