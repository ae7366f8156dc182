"""Level 0: types used everywhere (Batch, Loss, Event, errors), and formatting of bytes and seconds."""
