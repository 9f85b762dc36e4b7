"""How much of each draft is worth verifying: survival, costs, budget, allocation."""
