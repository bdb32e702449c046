"""The embedded engine: continuous batching in torch, in a process of its own.

`art.engines.process` is the server's side of that process.
"""
