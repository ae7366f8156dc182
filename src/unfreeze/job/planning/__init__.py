"""What a run will need: its plan, the settings of a first run, what to do in a shortage."""
