"""Check that every part of ART agrees on small random models in the shape of well-known families."""
