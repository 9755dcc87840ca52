"""The trainer: text, stages, checkpoints, metrics and the report of a run."""
