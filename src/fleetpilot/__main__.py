"""``python -m fleetpilot``."""

import sys

from fleetpilot.cli import main

if __name__ == "__main__":
    sys.exit(main())
