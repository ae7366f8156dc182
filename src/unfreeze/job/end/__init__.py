"""What a run leaves behind: its folder, result, checkpoint and card; and how it is resumed."""
