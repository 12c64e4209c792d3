"""How the devices of one host are shared between several runs."""
