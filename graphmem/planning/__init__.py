"""Several analyses for one question: what fits, how settings compare, what would save memory.

Every figure here is an analysis of its own, run with the setting it is told for; none is derived from another.
"""
