"""The first lines of every Python process of a command line that is recorded (:mod:`tests.recorded.lines`)."""

import os

if os.environ.get("GRAPHMEM_LINE_NOTES"):
    from tests.recorded.lines import note_peaks

    note_peaks(os.environ["GRAPHMEM_LINE_NOTES"])
