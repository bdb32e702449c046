"""The embedded engine: continuous batching in torch, in a process of its own."""
