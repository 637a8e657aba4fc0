"""The helper modules of this folder can be imported (importlib mode leaves it out)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
