"""What is kept of each training step beside its checkpoint, in `steps/<step>/` of a model's folder.

plan-<job>.json        which rollouts the step was given, and what became of each (`plan_record.py`)
tokens.safetensors     log-prob, entropy and mask reason of each trained token (`token_file.py`)
"""
