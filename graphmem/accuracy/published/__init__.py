"""Peaks that others published: which runs can be rebuilt, what is predicted for them, and how it compares."""
