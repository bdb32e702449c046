"""The headers that a pipeline's rollout adds to its requests."""

from __future__ import annotations

from art.client.rollout_context import RolloutContext, inside_rollout, request_headers


def test_only_a_rollout_that_switches_asks_for_new_weights_in_flight() -> None:
    assert request_headers("p/m") == {}
    with inside_rollout(RolloutContext(model="p/m", step=3)):
        assert request_headers("p/m") == {}
    with inside_rollout(RolloutContext(model="p/m", switches=True)):
        assert request_headers("p/m") == {"x-art-in-flight": "switch"}
        assert request_headers("p/other") == {}
    with inside_rollout(RolloutContext(model="p/m", switches=True, seed=1)):
        first, second = request_headers("p/m"), request_headers("p/m")
    assert first["x-art-in-flight"] == second["x-art-in-flight"] == "switch"
    assert first["x-art-seed"] != second["x-art-seed"]
