"""What a warm call would cost on a GPU, from what is known without one: a trace on tensors without memory,
the machine code of the kernels, and the tiles of a real route."""
