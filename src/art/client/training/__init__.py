"""Training as the client sees it.

submission        trajectories become wire types
training_calls    submits steps and follows them
train_job         `TrainJob`: a step under way, to await
steps             at which step each model was last seen, and which findings were logged
models            what a backend reads of a model, and returns for one: `Registration`, `TrainResult`
"""
