"""Training while rollouts run.

pipeline      `art.pipeline`, which users call, and the loop: what it opens, takes up and closes
flow          runs rollouts, and their groups: starts them when the pace allows, hands finished ones to the next step
pace          when a group may start, and which groups the next step takes; no clock, no asyncio
source        what the user gave: scenarios by their position in the stream, the rollout function
journal       what survives a kill
step          `PipelineStep`, which users get, and evaluations of checkpoints on held-out scenarios
"""
