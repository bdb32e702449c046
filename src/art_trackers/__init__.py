"""Trackers that `report_metrics` can name: one module each."""
