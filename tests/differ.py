"""``python -m tests.differ CASE``: see :mod:`tests.steps.differ`."""

from tests.steps.differ import main

if __name__ == "__main__":
    raise SystemExit(main())
