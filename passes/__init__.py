"""Graph rewriting, imported as ``rope_ops.passes``. Nothing here is imported by ``import rope_ops``."""
