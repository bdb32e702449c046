"""The programs of engine and trainer, and how the server starts, watches and restarts them."""
