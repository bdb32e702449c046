"""The page of a server: who may see it, and how its files are sent."""
