"""Whole programs: run as ``__main__``, left after some optimizer steps, without writing checkpoints."""
