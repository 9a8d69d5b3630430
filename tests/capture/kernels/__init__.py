"""Rules of single operators against recorded ones."""
