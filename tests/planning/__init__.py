"""fit, sweep, advise."""
