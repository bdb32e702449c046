"""Whether the ready tasks are learnt: runs of `art train` over seeds, their figures, tables and pictures."""
