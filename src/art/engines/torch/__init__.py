"""The embedded engine: a small vLLM in torch.

It lives in the engine's own process; `art.engines.process` is the server's side of that.
"""
