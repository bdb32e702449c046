"""What `art doctor` measures of a task's rollouts, to forecast how fast a training would be."""
