"""``graphmem`` in a followed process: its own folder is not on the path of the program."""

import sys

del sys.path[0]

if __name__ == "__main__":
    from graphmem.cli.start import main

    main()
