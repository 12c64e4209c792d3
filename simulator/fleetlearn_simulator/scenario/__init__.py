"""The scenario file: its tables, how it is read and checked, and how a run's own copy is
written."""
