"""Small random models in the shape of well-known families, and whether every part of ART agrees on them."""
