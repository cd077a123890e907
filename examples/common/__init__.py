"""Code shared by the examples: command-line options, losses and samplers by name, the training loop
with checkpoints, tables and curves."""
