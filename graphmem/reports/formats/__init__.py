"""graphmem's own report formats, a module each, which gives its format as ``FORMAT``."""
