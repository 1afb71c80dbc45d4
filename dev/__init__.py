"""What only the developers of Residua run: measurements, the GPU model, the compile gate, training. Not installed."""
