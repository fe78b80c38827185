"""Tables of configurations with what became of each: recorded on a real machine, or simulated for GPU clusters."""
