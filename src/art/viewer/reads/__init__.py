"""One module per answer of the page."""
