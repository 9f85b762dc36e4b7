"""Target models as pure functions over pytrees."""
