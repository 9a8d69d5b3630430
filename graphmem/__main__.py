"""``python -m graphmem``: the command line."""

from graphmem.cli.start import main

if __name__ == "__main__":
    main()
