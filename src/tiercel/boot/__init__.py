"""The composition root: from a person's options to a running engine. The only package that knows every part."""
