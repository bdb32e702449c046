"""Fakes and the tiny model, with which users can test their agents without a GPU or a download."""
