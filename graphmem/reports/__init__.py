"""Renderers: an Estimate in, text out. They know no framework, no allocator and no file."""
