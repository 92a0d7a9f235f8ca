"""Planning: what a recipe costs on hardware that is only described, before any of it is rented."""
