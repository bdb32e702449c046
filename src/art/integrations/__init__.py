"""Use agents and environments of other frameworks as rollouts. Each module needs the extra with its name."""
