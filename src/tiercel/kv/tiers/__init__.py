"""Tiers: where the bytes of pages and snapshots are kept once their pool has no room. Knows no request and no model."""
