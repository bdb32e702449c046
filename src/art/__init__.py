"""ART: on-the-job reinforcement learning for LLM agents."""

__version__ = "0.1.0"
