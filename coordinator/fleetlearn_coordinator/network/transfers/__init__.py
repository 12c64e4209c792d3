"""Contents on their way to devices."""
