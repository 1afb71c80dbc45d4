"""The errors that calls estimate, compared with their true errors."""
