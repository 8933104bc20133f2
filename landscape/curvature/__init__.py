"""Products of the loss Hessian with vectors, and the eigenvalues, trace and density that come of them."""
