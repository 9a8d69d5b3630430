"""Predictions held against measurements: what was measured, the measuring run, the comparison, the report."""
