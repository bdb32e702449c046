"""The notebooks of `examples/notebooks`: `python -m tools.notebooks` writes and runs them."""
