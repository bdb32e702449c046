"""The index of rollouts: a SQLite file that is derived from the files of a data directory and can be deleted."""
