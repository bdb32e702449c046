"""Training while rollouts run.

pipeline      `art.pipeline` and `Pipeline`, which users call, and admission of groups for loops of one's own
run           one call of `train`: what it opens, takes up and closes
flow          groups under way: starts them when the pace allows, and hands finished ones to the next step
pace          when a group may start, and which groups the next step takes; no clock, no asyncio
source        scenarios by their position in the stream
plan          plans of groups and rollouts, with their seeds
running       runs rollouts and groups: slots, time limits, `after_each`
concurrency   how many rollouts run at once
curriculum    chooses scenarios whose groups probably have spread
journal       what survives a kill
step_trainer  trains and logs the groups of one step
evaluating    evaluates checkpoints beside the training
step          `PipelineStep`, which users get
watch         who waits for whom
"""
