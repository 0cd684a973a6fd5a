"""Models: the only importer of flax.linen, used purely functionally."""
