"""Raises an error for `SkyPilotBackend`, which older code imports from here, that says what to use today."""

from art.compat.refused import refuse

refuse("art", "SkyPilotBackend")
