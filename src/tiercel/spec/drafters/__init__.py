"""Drafters: one file each, behind one interface. None knows the engine; what they propose is verified, so it may be
wrong.
"""
