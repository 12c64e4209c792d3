"""What a device is, when it is online, and what goes wrong with its tasks. All of it is computed
from its number."""
