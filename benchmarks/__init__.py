"""Benchmarks: each module measures one thing and has `add_options(parser)` and `run(args) -> Result`."""
