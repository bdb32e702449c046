"""Where older code looks for `ServerlessBackend`: an import says what to use today."""

from art.compat.refused import refuse

refuse("art", "ServerlessBackend")
