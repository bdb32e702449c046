"""`SkyPilotBackend` under its older name, which older code imports from here."""

from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.skypilot_backend import SkyPilotBackend

__all__ = ["SkyConfig", "SkyPilotBackend"]
