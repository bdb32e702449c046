"""Sinks: where metrics and rollouts go besides the local log. One file per tracker, e.g. `wandb.py`.

    history.jsonl, trajectories/  --delivery (a thread per sink, with a cursor in the log)-->  Sink  -->  tracker

The log on disk is the queue: training appends to it and never waits for a tracker. A sink reads the log from where its
cursor says; what a tracker did not accept stays in the log and is sent again, by this run or by the next one.

sink        the protocol: `Sink`, and what it is given
choose      the table of trackers, and which of them a model has
delivery    the thread of each sink; `log_reader` finds what it sends next
"""

from art.sinks.sink import Artefact, LoggedGroups, Refused, Row, Run, Sink

__all__ = ["Artefact", "LoggedGroups", "Refused", "Row", "Run", "Sink"]
