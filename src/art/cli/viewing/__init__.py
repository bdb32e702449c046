"""Parts of `art view`."""
