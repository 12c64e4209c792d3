"""What the updates, losses and features of single devices say of their data. No I/O, no clock."""
