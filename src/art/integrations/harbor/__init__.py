"""Task directories of the Harbor framework as tasks, each rollout in a container of its own.

harbor_task   the class `HarborTask`: scenarios, rollouts with the tools `bash` and `submit`, the verifier's reward
task_folder   reads a task directory, and refuses what would have no effect here
containers    builds images and runs commands in containers, by the command line of Podman or Docker
"""
