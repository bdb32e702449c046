"""The mismatch gate: rollouts are not trained on if the trained policy did not produce them.

    log pi - log mu of each target --evidence--> sums per rollout --gate--> which rollouts to leave out, and why

`noise.py` knows how far two correct implementations may differ in a number type.
"""
