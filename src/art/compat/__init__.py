"""What serves code written for ART 0.3 to 0.5; docs/older_code.md lists it."""
