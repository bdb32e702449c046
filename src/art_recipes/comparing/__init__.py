"""Comparing models on a task: `compare_models` and its parts."""
