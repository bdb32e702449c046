"""What the trainer is fed and what it gives back. No torch here: the runtime makes these without it."""

from art.protocol.samples import Component as Component
from art.protocol.samples import StepResult as StepResult
from art.protocol.samples import TrainingSample as TrainingSample
from art.protocol.samples import plain_sample as plain_sample
from art.protocol.samples import samples_from_wire as samples_from_wire
from art.storage.checkpoints import Probe as Probe  # what a step measures is a file of its checkpoint
