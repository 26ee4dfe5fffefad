"""Measured ahead of decoding: costs, calibration, and the tree that pays; see `headstart tune`."""
