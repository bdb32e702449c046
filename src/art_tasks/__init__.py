"""Ready tasks, and environments of other frameworks as tasks."""
