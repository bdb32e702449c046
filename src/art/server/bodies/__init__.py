"""Bodies of requests: read within limits, and their memory given back."""
