"""A folder with the page and its answers, which opens in a browser without any server."""
