"""Runs of every operation over fixed inputs: the self-check of a machine, and how long its operations take."""
