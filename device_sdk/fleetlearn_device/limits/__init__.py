"""How much of the machine a device may use: processors, memory, network and disk."""
