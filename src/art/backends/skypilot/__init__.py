"""Run an ART server on a machine that SkyPilot rents, and use it from here. docs/skypilot.md shows how."""

from art.backends.skypilot.sky import Sky
from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.skypilot_backend import SkyPilotBackend

__all__ = ["Sky", "SkyConfig", "SkyPilotBackend"]
