"""What happens now: the state of runs, requests as they are sampled, and the server itself."""
