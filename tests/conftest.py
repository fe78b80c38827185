"""Lies here so that pytest puts this folder on the import path: tests import `fakes` by that name."""
