"""Exports of checkpoints for other programs and places. A folder gets its name when it is complete, never before."""
