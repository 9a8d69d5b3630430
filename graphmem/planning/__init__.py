"""Several analyses for one question: the largest size that fits, sweeps of settings, advice.

Every figure here is an analysis of its own, run with the setting it is shown for; none is derived from another.
"""
