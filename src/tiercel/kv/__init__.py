"""Pages of keys and values: the pool that counts them, the keys that name what they hold, the tiers below. Knows no request."""
