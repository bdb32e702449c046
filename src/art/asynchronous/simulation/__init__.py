"""A simulation of asynchronous training: how long a run takes, without running it.

workload      what rollouts do: turns, seconds in the engine, seconds of tools
machine       what there is to do it with: seats of the engine, seconds of a training step
events        the clock, and a queue of work that runs at once
simulate      a run: rollouts, steps and their times, paced by the real `art.asynchronous.pace.Pace`
"""
