"""Where a server can run besides this machine: over ssh, by SkyPilot, at the managed service."""
