"""Measurements: ratios against a named peer, in one run, checked for equal results first."""
