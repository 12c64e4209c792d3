"""What must hold while a device serves: power, network, heat, hours, and a check of the owner's."""
