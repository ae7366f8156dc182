"""L7, the composition root: each recipe is a Config on top and a main below, read from top to bottom."""
