"""Damaged and hostile input for every reader: ``python -m tests.fuzz --kinds all --count 1000 --seed 1``.

``mutate`` damages bytes, text and JSON; ``samples`` has the sound files that are damaged; ``kinds`` says for each kind
of input what is damaged and which command reads it; ``judge`` runs one case in this process and says what was wrong
with the answer; ``__main__`` runs many of them in worker processes that may crash, hang or run out of memory.
"""
