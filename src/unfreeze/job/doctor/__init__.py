"""What can be known of a run before it starts: the checks of `unfreeze doctor`."""
