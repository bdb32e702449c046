"""What every recipe shares: settings, the training loop, its reports, comparisons of checkpoints and pictures."""
