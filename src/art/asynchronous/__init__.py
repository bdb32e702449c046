"""Training while rollouts run.

pipeline      `art.pipeline` and `Pipeline`, which users call
run           one call of `train`: the loop, what it opens, takes up and closes; evaluations beside it
flow          groups under way: starts them when the pace allows, and hands finished ones to the next step
pace          when a group may start, and which groups the next step takes; no clock, no asyncio
source        scenarios by their position in the stream; plans of groups
running       runs rollouts: slots, checkpoints, seeds, time limits
concurrency   how many rollouts run at once
journal       what survives a kill
step          `PipelineStep`, which users get
"""
