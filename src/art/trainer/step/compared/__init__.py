"""Comparisons of a small part of a step with other weights: the base model, and the checkpoints that sampled it."""
