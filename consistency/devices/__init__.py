"""The devices of this machine and the host around them."""
