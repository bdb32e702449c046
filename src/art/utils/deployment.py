"""Where older code looks for `deploy_model`: an import says what to use today."""

from art.compat.refused import refusals

__getattr__ = refusals(__name__)
