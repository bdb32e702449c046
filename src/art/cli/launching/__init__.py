"""Helpers of `art launch`: the kinds of machines that a server can be launched on, and what is done with it then."""
