"""What the page shows about the runs of a data directory: functions over its files. `viewer.Viewer` is the entry."""
