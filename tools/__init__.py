"""Programs for people who work on ART itself. They are not part of the package that users install."""
