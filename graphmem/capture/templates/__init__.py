"""Traces as functions of one size of the step: learnt from a few captures, evaluated for any other size."""
