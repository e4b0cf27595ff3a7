"""Keys and values: the pool that counts pages, the keys that name them, the tiers below. Knows no request."""
