"""The game of 2048 as a task: `game.py` has the task, `board.py` the rules."""
