"""Tools that every room may use and that import no room: documents with limits, figures known to an interval, files,
the usual formulas, the register of versions. ``graphmem.errors`` and ``graphmem.units`` belong to it, and have public
names."""
