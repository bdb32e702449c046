"""The gateway's bench, for tests of what is recorded of its answers."""

from tests.unit.gateway.conftest import bench

__all__ = ["bench"]
