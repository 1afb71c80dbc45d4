"""What stands for the skipped groups: which share a key, and what their keys and values are."""
