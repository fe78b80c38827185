"""A measured trial as files that train without Brimful, one module a target."""
