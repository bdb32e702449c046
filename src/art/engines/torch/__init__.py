"""The embedded engine: a small vLLM in torch.

`handle` is the server's side and never loads torch; the other modules live in the engine's own process.
"""
