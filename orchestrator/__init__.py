"""Brimful: finds the fastest LLM fine-tuning configuration that fits in memory, over a whole cluster."""
