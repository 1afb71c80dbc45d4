"""What stands for skipped pairs, at equal cost."""
