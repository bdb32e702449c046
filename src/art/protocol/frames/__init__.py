"""Messages between the server and its processes as bytes, and the child's end of their connection."""
