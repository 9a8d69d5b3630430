"""The table of blocks that :mod:`.plain_path` fills: a row a block, of whole numbers."""

#: Columns. ``SERIAL`` and ``ADDRESS`` make a block's order; ``PREV`` and ``NEXT`` are rows, or -1; ``SET`` is twice the
#: stream, and one more in the large pool.
SIZE, SERIAL, ADDRESS, PREV, NEXT, STATE, SET, REQUESTED = range(8)
