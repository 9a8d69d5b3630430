"""Models to measure and to test with, built from code and configuration alone: no weights, no data."""
