"""`python -m memscale.benchmarks`."""

import sys

from memscale.benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
