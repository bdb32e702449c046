"""Task directories of the Harbor framework as tasks, run on this machine without containers.

harbor_task   the class `HarborTask`: scenarios, rollouts with the tools `bash` and `submit`, the verifier's reward
task_folder   reads a task directory, and refuses what needs a container
dockerfile    reads the few instructions of a Dockerfile that can be followed without one
verifier      runs the tests, reads the reward
splits        which tasks are for training
output        reads the output of a command
sandbox       runs commands in Linux namespaces: no network, no files of the user, limits (sandbox.sh)
"""
