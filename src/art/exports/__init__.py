"""Checkpoints for other programs and places. Each is made beside its place and renamed, so it is whole or absent."""
