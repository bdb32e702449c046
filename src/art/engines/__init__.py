"""The kinds of `art.engine.Engine`."""
