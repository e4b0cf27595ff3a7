"""A KV tier in a Valkey or Redis server: `{type: ValkeyTier, module_path: tiercel_tier_valkey, url: ..., ...}`."""

from tiercel_tier_valkey.options import ValkeyOptions
from tiercel_tier_valkey.tier import ValkeyTier

__all__ = ["ValkeyOptions", "ValkeyTier"]
