"""The checks of `unfreeze doctor`: faults of a run that can be found before it starts."""
