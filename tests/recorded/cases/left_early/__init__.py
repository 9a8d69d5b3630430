"""Programs whose loops graphmem leaves early: they train in several runs, or on batches of many sizes, and are recorded
from their first line to their last."""
