"""Traces as functions of one size of the step, or of the number of layers: learnt from a few captures."""
