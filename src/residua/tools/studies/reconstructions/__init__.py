"""The reconstructions compared at equal cost."""
