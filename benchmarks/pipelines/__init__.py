"""What `benchmarks.pipeline` trains, how it runs one arm, and what it draws."""
