"""Images of the Dockerfile, built and run without Docker: `python -m tools.images cpu`."""
