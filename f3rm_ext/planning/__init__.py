"""Knowing before a run whether it fits, how long it takes and which options to use."""
