"""The life of a sweep: events in, actions out, every transition durable before its side effect."""
