"""What survives a kill of a pipeline: which groups are under way, and every rollout that has ended.

journal    `Journal`: one method per thing that happens; each returns when it is on disk
writer     one thread that writes; everything that waits is made durable by one fsync
state      what the file says by now, and which of its lines still count
lines      a line of the file, and how a torn one is told from a damaged one
records    the dataclasses, and their JSON
"""

from art.asynchronous.journal.journal import Journal
from art.asynchronous.journal.records import KeptGroup, PendingStep, Resumed

__all__ = ["Journal", "KeptGroup", "PendingStep", "Resumed"]
