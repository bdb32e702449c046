"""Refuses `SkyPilotBackend` of older code, and says what to use today."""

from art.compat.refused import refuse

refuse("art", "SkyPilotBackend")
