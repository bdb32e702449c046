"""Parts of `art judge`."""
