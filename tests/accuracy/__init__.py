"""Measuring, comparing, calibrating."""
