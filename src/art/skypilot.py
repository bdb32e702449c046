"""Where older code looks for `SkyPilotBackend`: an import says what to use today."""

from art.compat.refused import refuse

refuse("art", "SkyPilotBackend")
