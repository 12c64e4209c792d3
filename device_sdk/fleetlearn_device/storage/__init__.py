"""What a device keeps on disk, in one directory."""
