"""Fakes and contract kits, for our tests and for plugin authors. Knows every contract and nothing behind it."""
