"""What is kept of requests and rollouts: exchanges, conversations, rollouts and usage, in SQLite."""
