"""Training with n learners: recipes, mixing, update rules, decomposition, and the one loop over them all."""
