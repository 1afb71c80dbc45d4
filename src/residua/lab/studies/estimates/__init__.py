"""What a call says of its error, against what it is."""
