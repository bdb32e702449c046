"""Its presence puts `tests/` on the import path, so that test folders can share helper modules."""
