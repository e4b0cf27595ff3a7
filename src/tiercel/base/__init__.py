"""Errors, units, the environment table and the configuration tree. Standard library only; knows no other part."""
