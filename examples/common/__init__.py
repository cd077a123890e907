"""What the examples share: options, losses and samplers by name, the training loop with its checkpoints, tables and curves.

Each example's folder holds a link to this one, so that its programs find it as `common` wherever they are started.
"""
