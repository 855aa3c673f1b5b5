"""The byte format: data files of checksummed blocks, and the manifest that ties them to a save (FORMAT.md)."""
