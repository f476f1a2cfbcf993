"""Generate text with a model on disk: the same as the console command ``nbkernels generate``; ``--help`` lists the options."""

import sys

from nbkernels.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
