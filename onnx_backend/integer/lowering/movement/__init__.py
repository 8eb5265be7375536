"""Ops that move, copy or interpolate codes."""
