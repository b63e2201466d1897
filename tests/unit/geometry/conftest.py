"""Let the tests of this folder import what stands beside them, as ``geometry.formats`` and so on."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[1])
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
