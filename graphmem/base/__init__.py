"""What every room may use and what knows none: documents with limits, figures known to an interval, files,
the usual formulas, the register of versions. ``graphmem.errors`` and ``graphmem.units`` belong to it, and have
public names."""
