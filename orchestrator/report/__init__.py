"""From records to what people and programs read: compute first (`rows`, `summary`), then render."""
