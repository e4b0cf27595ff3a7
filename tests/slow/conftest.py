import sys
from pathlib import Path

# The server's kit, which these tests drive for longer.
sys.path.insert(0, str(Path(__file__).parent.parent / "api"))
