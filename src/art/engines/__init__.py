"""Implementations of `art.engine.Engine`."""
