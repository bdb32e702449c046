"""The task `temporal_clue`: puzzles of who, where, when, with what and why. `task.py` has the task."""
