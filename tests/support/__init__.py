"""What tests of several folders share: fakes, reference implementations, whole applications."""
