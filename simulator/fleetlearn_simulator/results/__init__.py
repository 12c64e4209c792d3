"""A run's folder: how it is written, how it is read again, and the pages that are made from one."""
