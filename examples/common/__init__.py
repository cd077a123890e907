"""What the examples share: options, losses and samplers by name, the training loop with its checkpoints, tables and curves."""
