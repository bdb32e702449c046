"""Fakes and the tiny model, shipped so that users can test their agents without a GPU or a download."""
