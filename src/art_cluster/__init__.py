"""Ray as the control plane beyond one machine: engines, trainers and rollouts run on its nodes.

Importing this package, before `ray` itself, makes Ray use its token where this user has one (`ray get-auth-token
--generate`), and send no statistics. By itself Ray reads the token only for a cluster that it finds without an address.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
has_token = Path.home().joinpath(".ray", "auth_token").exists() or (
    os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
)
if has_token and "ray" not in sys.modules:  # Ray has read the variable already, and would start servers that refuse it
    os.environ.setdefault("RAY_AUTH_MODE", "token")
