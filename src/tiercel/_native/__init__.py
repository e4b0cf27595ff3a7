"""The one Python door to the compiled core. Knows nothing of models or requests; see `native/include/tiercel/`."""

from tiercel._native._core import *  # noqa: F403
