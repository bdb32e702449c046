"""`ServerlessBackend`: training and inference by W&B Training, which is CoreWeave's Serverless Training.

serverless_backend.py     the backend: register, train, log
service_settings.py       which settings the service honours; the others are refused before anything is sent
conversations.py          groups and trajectories, as the service takes them
steps.py                  one training step: send it once, follow it, find it again
sent_jobs.py              what was sent, on disk, for a script that was killed
service.py                HTTP calls, with what may be repeated and what may not
wire.py                   the service's types
service_checkpoints.py    lists and deletes checkpoints; how methods are refused
"""
