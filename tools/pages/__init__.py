"""Reference pages made from the code, so that they cannot say anything else: `python -m tools.pages`."""
