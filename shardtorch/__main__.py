"""`python -m shardtorch` is the command `shardtorch`."""

import sys

from shardtorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
