"""The conditional space of knobs and its finite set of candidates."""
