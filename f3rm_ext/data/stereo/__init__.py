"""Depth of photos and dense points by plane-sweep stereo."""
