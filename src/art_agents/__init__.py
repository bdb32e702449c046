"""Command-line coding agents as they are: how each is installed, pointed to a rollout's address, and run alone."""
