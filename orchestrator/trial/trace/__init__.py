"""Traces one training step on tensors without data: which storages it makes, and when they die."""
