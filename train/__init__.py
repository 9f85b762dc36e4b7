"""Training jobs: data, features, losses, trainer and evaluation of DSpark drafters."""
