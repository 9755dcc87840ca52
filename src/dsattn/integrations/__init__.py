"""Adapters to other libraries: their models, configurations and checkpoints."""
